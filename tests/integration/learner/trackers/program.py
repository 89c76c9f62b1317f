"""Writes records to one real tracker, offline, and reads back what its package stored: ``program.py NAME FOLDER ACT``.

It runs in an environment that has the tracker's package, which may have others of the packages that offbeat has.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np

from learner.samples import Sample, SamplePart
from learner.trackers.opening import open_trackers
from learner.trackers.sink import Histograms, Samples, Scalars, Summary, Text, TrackedRun

CONFIG = {"learner": {"optimizer": {"lr": 0.5}}, "run": {"trackers": ["x"]}}
SAMPLE = Sample(
    step=2,
    policy_version=1,
    split="heldout",
    env="e",
    task="t",
    group="g",
    parts=[SamplePart("prompt", "1 + 1?", 4), SamplePart("answer", "2\x1b[2J", 1)],
    return_=0.75,
)


def write(name, folder, steps, *, ends, clock):
    (sink,) = open_trackers([name], TrackedRun("spell", folder, "letters", CONFIG))
    for step in steps:
        sink.write(Scalars(step, clock + step, {"learner/loss": step * 0.5, "reward/a b#c": 1.0}))
    if ends:
        sink.write(Histograms(2, clock + 2, {"histogram/return_generated": np.array([0.0, 1.0, 1.0])}))
        sink.write(Text(2, clock + 2, "notes", "a **note**"))
        sink.write(Scalars(2, clock + 2.5, {"evaluation/hard/accuracy": 0.25}))
        sink.write(Samples(2, clock + 2.5, (SAMPLE,)))
        sink.write(Summary(3, clock + 3, {"ended_by": "all steps done", "policy_lag": {"max_versions": 3}}))
    else:
        sink.rewind(1)
    sink.close(failed=not ends)
    assert (sink.lost, sink.abandoned) == (0, False)


def records_of(path):
    """Yield the records of a file in LevelDB's log format, which two of the trackers use."""
    data, position, whole = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (left := 32_768 - position % 32_768) < 7:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        whole += data[position + 7 : position + 7 + size]
        position += 7 + size
        # 1: a whole record. 4: the last part of one.
        if kind in (1, 4):
            yield whole
            whole = b""


def points(rows, name):
    return sorted((row["step"], row[name], row["wall_time"]) for row in rows if name in row)


def read_wandb(folder):
    from wandb.proto import wandb_internal_pb2 as proto

    rows, ids, summary, config = [], [], {}, {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for one in records_of(path):
            record = proto.Record.FromString(one)
            match record.WhichOneof("record_type"):
                case "run":
                    ids.append((record.run.project, record.run.display_name, record.run.run_id))
                    config |= {u.key: json.loads(u.value_json) for u in record.run.config.update}
                case "history":
                    names = {
                        "/".join(i.nested_key) if i.nested_key else i.key: i.value_json
                        for i in record.history.item
                    }
                    rows.append({name: json.loads(value) for name, value in names.items()})
                case "summary":
                    summary |= {
                        u.key or "/".join(u.nested_key): json.loads(u.value_json)
                        for u in record.summary.update
                    }
    assert all(row["_timestamp"] == row["wall_time"] for row in rows)
    (table,) = folder.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    table = json.loads(table.read_text())
    return {
        "runs": sorted(set(ids)),
        "loss": points(rows, "learner/loss"),
        "odd": points(rows, "reward/a b#c"),
        "held_out": points(rows, "evaluation/hard/accuracy"),
        "config": config["learner"],
        "histogram": any("histogram/return_generated/bins" in row for row in rows),
        "answer": dict(zip(table["columns"], table["data"][0], strict=True))["answer"],
        "summary": [summary["summary/ended_by"], summary["summary/policy_lag.max_versions"]],
        "notes": len(list(folder.glob("wandb/offline-run-*/files/media/table/notes_*"))),
    }


def read_mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("letters")
    runs = client.search_runs([experiment.experiment_id])
    number = runs[0].info.run_id

    def history(name):
        found = client.get_metric_history(number, name)
        return sorted((m.step, m.value, m.timestamp / 1000) for m in found)

    def stored(pattern):
        (path,) = folder.glob(f"mlflow/{number}/artifacts/{pattern}")
        return path.read_text()

    table = json.loads(stored("samples/*"))
    summary = json.loads(stored("summary.json"))
    assert runs[0].data.tags["summary.ended_by"] == "all steps done"
    assert runs[0].info.status == "FINISHED"
    assert json.loads(stored("config.json")) == CONFIG
    return {
        "runs": [("letters", run.info.run_name, run.data.tags["offbeat.run"]) for run in runs],
        "loss": history("learner/loss"),
        "odd": history("reward/a b_c"),
        "held_out": history("evaluation/hard/accuracy"),
        "config": {"optimizer": {"lr": float(runs[0].data.params["learner.optimizer.lr"])}},
        "histogram": json.loads(stored("histograms/*"))["histogram/return_generated"]["counts"][-1] == 2,
        "answer": dict(zip(table["columns"], table["data"][0], strict=True))["answer"],
        "summary": [summary["ended_by"], summary["policy_lag"]["max_versions"]],
        "notes": len(list(folder.glob(f"mlflow/{number}/artifacts/notes/*"))),
    }


def read_trackio(folder):
    import sqlite3

    (path,) = (folder / "trackio").glob("letters.db")
    with sqlite3.connect(path) as base:
        stored = list(base.execute("select run_name, run_id, step, metrics from metrics order by id"))
        configs = [json.loads(row[0]) for row in base.execute("select config from configs")]
    rows = [{"step": step, **json.loads(metrics)} for _, _, step, metrics in stored]
    named = {name: value for row in rows for name, value in row.items()}
    assert {name.startswith("spell-") for name, *_ in stored} == {True}
    return {
        "runs": sorted({("letters", "spell", number) for _, number, *_ in stored}),
        "loss": points(rows, "learner/loss"),
        "odd": points(rows, "reward/a b#c"),
        "held_out": points(rows, "evaluation/hard/accuracy"),
        "config": configs[0]["learner"],
        "histogram": sum(named["histogram/return_generated"]["values"]) == 3,
        "answer": named["samples"]["_value"][0]["answer"],
        "summary": ["all steps done", int(named["summary/policy_lag.max_versions"])],
        "notes": sum("notes" in row for row in rows),
    }


def read_swanlab(folder):
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    runs, points_of, media, logged = set(), {}, [], 0
    for path in sorted(folder.glob("swanlog/run-*/run-*.swanlab")):
        clock = {}
        for record in map(Record.FromString, records_of(path)):
            match record.WhichOneof("record_type"):
                case "start":
                    runs.add((record.start.project, record.start.name, record.start.id))
                case "scalar":
                    one = record.scalar
                    if one.key == "wall_time":
                        clock[one.step] = one.value.number
                    else:
                        # The wall clock of a record stands before its other numbers.
                        found = (one.step, one.value.number, clock[one.step])
                        points_of.setdefault(one.key, []).append(found)
                case "media":
                    media += [(record.media.key, item.filename) for item in record.media.value.items]
                case "log":
                    logged += 1
    config = yaml.safe_load(next(folder.glob("swanlog/run-*/files/config.yaml")).read_text())

    def stored(key):
        return [
            next(folder.glob(f"swanlog/run-*/media/*/{name}")).read_text() for of, name in media if of == key
        ]

    (samples,), (summary,), (bars,) = (
        stored("samples"),
        stored("summary"),
        stored("histogram/return_generated"),
    )
    summary = json.loads(summary)
    return {
        "runs": sorted(runs),
        "loss": sorted(points_of["learner/loss"]),
        "odd": sorted(points_of["reward/a b#c"]),
        "held_out": sorted(points_of["evaluation/hard/accuracy"]),
        "config": config["learner"]["value"],
        "histogram": "1.0" in bars or "0.98" in bars,
        "answer": "2\\x1b[2J" if "2\\\\x1b[2J" in samples else samples,
        "summary": [summary["ended_by"], summary["policy_lag"]["max_versions"]],
        "notes": len(stored("notes")),
        "console_lines": logged,
    }


READ = {"swanlab": read_swanlab, "wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}


def main():
    name, folder, act = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    match act:
        case "begin":
            write(name, folder, [1, 2], ends=False, clock=1000.0)
        case "resume":
            write(name, folder, [2, 3], ends=True, clock=2000.0)
        case "read":
            (folder / "read.json").write_text(json.dumps(READ[name](folder)))


if __name__ == "__main__":
    main()
