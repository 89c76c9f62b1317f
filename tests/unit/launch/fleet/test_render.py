"""Rendered files are as the golden files have them, valid for their engines, without secrets, and safe to quote."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.cli import main
from launch.errors import ConfigError
from launch.fleet.job import Job
from launch.fleet.render import ENGINES, head_command, render
from launch.fleet.site import KubernetesSite, RaySite, Site, SlurmSite, SshSite, SystemdSite, read_site
from launch.fleet.ticket import make_ticket, secrets_of
from launch.run_file.load import check

GOLDEN = Path(__file__).with_name("golden")
SITE = Site(
    slurm=SlurmSite(
        partition="low", head_partition="high", account="me", gres="gpu:1", time="12:00:00",
        setup="module load cuda\nsource venv/bin/activate", generators=4, actors=2,
    ),
    ssh=SshSite(hosts=("gpu7", "me@gpu8"), setup=". venv/bin/activate", address="10.0.0.5"),
    systemd=SystemdSite(user="offbeat", address="10.0.0.5"),
    ray=RaySite(hosts=3, gpus=1.0, resources={"gpu_host": 1.0}, setup=". venv/bin/activate", address="10.0.0.5"),
    kubernetes=KubernetesSite(
        image="registry.example/offbeat:1", generators=4, actors=2, gpus=1, memory="32Gi", env_secret="hub",
        node_selector={"pool": "gpu"}, tolerations=("spot",), monitor=True,
    ),
)  # fmt: skip


def job(run_file="run.toml", overrides=("learner.steps=40",), **content):
    content = {"run": {"name": "r"}, "model": {"path": "m"}, "env": {"name": "calculator"}, **content}
    carried = {"run.toml": '[run]\nname = "r"\n', "rewards.py": "def exact(answer):\n    return 1.0\n"}
    return Job(run_file, tuple(overrides), check(content, "a test"), carried, (3 << 30, 5 << 30))


def all_files():
    return [(engine, name, text) for engine in ENGINES for name, text in render(job(), SITE, engine).items()]


@pytest.mark.parametrize(("engine", "name", "text"), all_files(), ids=lambda part: part[:20])
def test_files_are_as_the_golden_files(engine, name, text):
    """To take over a change: write ``text`` to the file, and read the difference."""
    assert text == (GOLDEN / engine / name).read_text()


def test_there_is_no_golden_file_too_many():
    there = {(path.parent.name, path.name) for path in GOLDEN.rglob("*") if path.is_file()}
    assert there == {(engine, name) for engine, name, _ in all_files()}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for _, name, text in all_files() if text.startswith("#!")]
)
def test_bash_reads_the_scripts(name, text):
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), name


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for _, name, text in all_files() if text.startswith("#!")]
)
def test_shellcheck_has_nothing_to_say_of_the_scripts(name, text):
    # What `setup` sources is the user's own, and not here to be read.
    checked = ["shellcheck", "--norc", "--exclude=SC1091", "-"]
    done = subprocess.run(checked, input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, ""), name


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("user", ["", "root"])
def test_systemd_reads_the_units(tmp_path, user):
    program = tmp_path / "offbeat"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    site = Site(systemd=SystemdSite(user=user, program=str(program), folder=str(tmp_path)))
    for name, text in render(job("a run.toml", ["run.name=100%"]), site, "systemd").items():
        path = tmp_path / name.replace("@", "@x")
        path.write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False
        )
        # Its exit code is 0 for an unknown key, so the text counts.
        assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_every_head_goes_on_in_its_folder_or_starts_there(engine):
    """A newer folder of the run, `r-2`, may be there, and tickets and hosts wait in `r`."""
    (head,) = [text for name, text in render(job(), SITE, engine).items() if "head" in name]
    starts = [line for line in head.splitlines() if "offbeat train" in line]
    assert [line.split().count("--again") for line in starts] == [1]


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r"), min_size=1, max_size=30)


@given(run_file=WORDS, override=WORDS)
def test_any_name_and_any_override_is_one_word_of_the_command(run_file, override):
    made = job(run_file, [override])
    words = ["offbeat", *head_command(made, 5755)]
    (line,) = [
        line for line in render(made, SITE, "slurm")["head.sbatch"].split("\n") if line.startswith("srun")
    ]
    assert shlex.split(line.split(" weights.advertised_host=")[0])[3:] == words


def test_no_secret_of_a_run_is_in_any_text(tmp_path, monkeypatch):
    from tests.unit.launch.fleet.test_ticket import settings

    monkeypatch.chdir(tmp_path)
    config = settings(tmp_path)
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    from launch.run_folder import CONFIG, save_config
    from protocol.security import key_files

    save_config(config, folder / CONFIG)
    key_files.make(folder / "keys")
    hidden = secrets_of(make_ticket(folder, host="gpu7"))
    hidden += [path.read_text().strip() for path in (folder / "keys").glob("*.secret")]
    assert len(hidden) >= 6
    for engine in ENGINES:
        for text in render(Job("run.toml", (), config, {"run.toml": "a"}), SITE, engine).values():
            assert not any(secret in text for secret in hidden)


def test_addresses_that_the_run_file_opens_stay():
    opened = {
        "broker": {"endpoint": "tcp://10.0.0.5:1", "http": "10.0.0.5:2"},
        "weights": {"http": "10.0.0.5:3"},
    }
    words = head_command(job(**opened), 5755)
    assert words == ["train", "run.toml", "learner.steps=40", "generator.count=0", "actor.count=0", "--again"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[slurm]\npartion = 'low'", "did you mean 'partition'"),
        ("[slrm]\n", "did you mean 'slurm'"),
        ("[slurm]\ngres = 'gpu:1 --uid=0'", "slurm.gres"),
        ("[slurm]\nlargest = 0", "slurm.largest"),
        ("[ssh]\nfolder = 'a b'", "ssh.folder"),
        ("[ssh]\nhosts = ['a:22']", "ssh.hosts"),
        ("[kubernetes]\nimages = 'a'", "did you mean 'image'"),
        ("[kubernetes]\nmemory = '32 GB'", "kubernetes.memory"),
        ("[kubernetes]\nnode_selector = {pool = 'a b'}", "kubernetes.node_selector"),
        ("[kubernetes]\nfiles = ['../']", "kubernetes.files"),
        ("[", "not valid TOML"),
    ],
)
def test_a_site_file_with_a_mistake_is_refused(tmp_path, text, words):
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_site(path)


def test_the_page_has_a_site_file_that_can_be_read_and_explains_every_field(tmp_path):
    pages = Path(__file__).parents[4] / "docs" / "run"
    page = (pages / "fleet.md").read_text()
    path = tmp_path / "site.toml"
    path.write_text(re.search(r"```toml\n(# site.toml\n.*?)```", page, re.DOTALL)[1])
    assert read_site(path).ssh.hosts == ("gpu7", "gpu8")
    for engine, section in Site():
        own = pages / f"{engine}.md"
        text = own.read_text() if own.exists() else page
        table = text.partition(f"| field of `[{engine}]` | meaning |")[2].partition("\n\n")[0]
        rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("|")]
        named = set(re.findall(r"`(\w+)`", " ".join(rows)))
        assert named == set(type(section).model_fields), engine


def test_the_command_writes_files_and_starts_nothing(tmp_path, capsys):
    site = tmp_path / "site.toml"
    site.write_text("[systemd]\nuser = 'me'\n")
    words = ["launch", "spell_backward", "--site", str(site), "--render", str(tmp_path / "out")]
    assert main([*words, "--on", "slurm", "run.name=t"]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "head.sbatch", "generators.sbatch", "actors.sbatch",
    }  # fmt: skip
    assert "offbeat-t-head" in (tmp_path / "out" / "head.sbatch").read_text()
    assert main(["launch", "spell_backward", "--on", "ssh"]) == 1
    assert "names no hosts" in capsys.readouterr().err
    assert main(["launch", "--stop", str(tmp_path / "runs" / "r")]) == 1
    assert "nothing was launched" in capsys.readouterr().err


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Stand-ins for the programs of Slurm that note how they were called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "scontrol", "scancel"):
        path = programs / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>{tmp_path}/calls\n[ {name} != sbatch ] || echo 17\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.chdir(tmp_path)
    return lambda: (tmp_path / "calls").read_text().splitlines()


def test_slurm_gets_the_jobs_the_throttle_and_the_end(slurm, tmp_path, capsys):
    from launch.fleet.engines import launched_of, throttle

    assert main(["launch", "spell_backward", "--on", "slurm", "run.name=t"]) == 0
    assert slurm() == [
        f"sbatch --parsable runs/t.launch/{role}.sbatch" for role in ("head", "generators", "actors")
    ]
    launched = launched_of(Path("runs/t"))
    said = []
    throttle(launched, "generator", 6, said.append)
    throttle(launched, "actor", 3, said.append)
    assert slurm()[3:] == [
        "scontrol update JobId=17 ArrayTaskThrottle=6",
        "scontrol update JobId=17 ArrayTaskThrottle=2",
    ]
    assert main(["launch", "--stop", "runs/t"]) == 0
    assert slurm()[-1] == "scancel 17 17 17"
