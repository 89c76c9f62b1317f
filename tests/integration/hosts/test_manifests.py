"""Kubernetes' schemas accept the rendered objects, and the Helm chart makes the same ones.

The packages have 350 MB, so they are in an environment of their own, which the test makes once.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launch.fleet.render import render
from launch.fleet.site import KubernetesSite, Site
from tests.integration.hosts.hosts_harness import ROOT
from tests.unit.launch.fleet.test_render import SITE, job

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
FOLDER = ROOT / "build" / "kubernetes-env"
PACKAGES = ("kubernetes-validate>=1.37", "helm-python-sdk")
FULL = KubernetesSite(
    image="registry.example/offbeat@sha256:1", pull_secret="pull", generators=0, actors=3, actors_per_pod=4, gpus=8,
    head_gpus=2, gpu_resource="amd.com/gpu", cpus="4", memory="32Gi", head_cpus="500m", head_memory="64Gi",
    actor_cpus="2", actor_memory="4Gi", shm="12Gi", head_shm="24Gi", volume="100Gi", storage_class="fast",
    data_claim="models", env_secret="hub", node_selector={"pool": "true"}, head_node_selector={"a.b/c": "1"},
    tolerations=("spot", "nvidia.com/gpu"), head_tolerations=("nvidia.com/gpu",), monitor=True, grace_s=45, port=6000,
)  # fmt: skip


@pytest.fixture(scope="module")
def python():
    """Python of the environment with the packages."""
    program = FOLDER / "bin" / "python"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True, timeout=120)
    install = [program, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *PACKAGES]
    done = subprocess.run(install, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"{', '.join(PACKAGES)} cannot be installed here: {done.stderr.strip()[-300:]}")
    return program


def test_schemas_accept_the_objects_and_the_chart_makes_the_same_ones(python, tmp_path):
    jobs = {"plain": (job(), SITE), "full": (job(overrides=['run.project=a"$(B)"']), Site(kubernetes=FULL))}
    jobs["bare"] = (job(overrides=[]), Site(kubernetes=KubernetesSite(image="offbeat")))
    for name, (made, site) in jobs.items():
        (tmp_path / name).mkdir()
        for file, text in render(made, site, "kubernetes").items():
            (tmp_path / name / file).write_text(text)
    program = Path(__file__).with_name("chart_objects.py")
    autoscaler = (
        (ROOT / "docs" / "run" / "kubernetes.md").read_text().partition("# hpa.yaml\n")[2].partition("```")[0]
    )
    assert yaml.safe_load(autoscaler)["kind"] == "HorizontalPodAutoscaler"
    (tmp_path / "hpa.yaml").write_text(autoscaler)
    done = subprocess.run(
        [python, program, tmp_path], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("same", 0), done.stdout + done.stderr


def test_a_wrong_field_and_a_chart_that_differs_are_found(python, tmp_path):
    """The test above could not fail otherwise."""
    (tmp_path / "r").mkdir()
    for file, text in render(job(), SITE, "kubernetes").items():
        wrong = text.replace("replicas: 4", "replica: 4").replace("maxSurge: 0", "maxSurge: 1")
        (tmp_path / "r" / file).write_text(wrong)
    program = Path(__file__).with_name("chart_objects.py")
    done = subprocess.run(
        [python, program, tmp_path], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "maxSurge: launch has 1, the chart 0" in done.stdout
    assert "Additional properties are not allowed ('replica' was unexpected)" in done.stdout
