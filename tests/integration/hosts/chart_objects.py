"""Render the Helm chart and check objects against Kubernetes' schemas, in the environment that has their packages.

``chart_objects.py FOLDER``: each ``FOLDER/*/values.yaml`` is rendered with the chart, and compared with the objects in
the other YAML files of its folder. ``FOLDER/*.yaml`` are only checked. Prints one line for each difference, or "same".
"""

import sys
from pathlib import Path

import helm_python as helm
import kubernetes_validate
import yaml

CHART = Path(__file__).parents[3] / "launch" / "kubernetes" / "chart"
CUSTOM = {"ServiceMonitor"}
"""Kinds that a cluster learns from an operator, so that Kubernetes has no schema for them."""


def by_name(texts):
    documents = [document for text in texts for document in yaml.safe_load_all(text) if document]
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in documents}


def differences(one, other, path=""):
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            yield from differences(one.get(key), other.get(key), f"{path}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (first, second) in enumerate(zip(one, other, strict=True)):
            yield from differences(first, second, f"{path}[{number}]")
    elif one != other:
        yield f"{path}: launch has {one!r}, the chart {other!r}"


def main(folder):
    found = []
    for values in sorted(Path(folder).glob("*/values.yaml")):
        launched = by_name(path.read_text() for path in values.parent.glob("*.yaml") if path != values)
        with helm.Chart.load(str(CHART)) as chart:
            rendered = by_name(render(chart, yaml.safe_load(values.read_text())))
        found += differences(launched, rendered, values.parent.name)
        found += misfits(launched)
    found += misfits(by_name(path.read_text() for path in Path(folder).glob("*.yaml")))
    return found


def misfits(objects):
    """Yield what the schemas of two versions do not accept."""
    for name, one in objects.items():
        for version in ("1.34", kubernetes_validate.latest_version()):
            if one["kind"] in CUSTOM:
                continue
            try:
                kubernetes_validate.validate(one, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"{name} {version}: {'.'.join(map(str, error.path))}: {error.message}"


def render(chart, values):
    files = chart.render(values=values, name="offbeat", namespace="default")
    return [text for name, text in files.items() if name.endswith(".yaml")]


if __name__ == "__main__":
    report = helm.lint(str(CHART), values={"image": "registry.example/offbeat:1"}, strict=True)
    lines = [f"lint: {one['path']}: {one['error']}" for one in report["messages"] if one["severity"] > 1]
    lines += [f"lint: {error}" for error in report["errors"]] + main(sys.argv[1])
    print("\n".join(lines) or "same")
    sys.exit(bool(lines))
