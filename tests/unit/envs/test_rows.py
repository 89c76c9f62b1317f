"""Test the suite `rows`: reading, prompts, splits, order, and every refusal with file and line."""

import asyncio
import csv
import gzip
import json
import os
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from envs.errors import EnvError
from envs.registry import content_hash, make_suite
from envs.rows.reading import is_heldout, permuted, position, read_rows

SUMS = [
    {"prompt": f"{a} + {b} =", "answer": str(a + b), "a": a, "b": b} for a in range(10) for b in range(10)
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return a working folder with ``train.jsonl`` of 100 sums, and a reward function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path / "train.jsonl", SUMS)
    (tmp_path / "rewards.py").write_text(
        "def exact(answer, row):\n    return answer.strip() == str(row['answer'])\n"
    )
    return tmp_path


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def suite(**params):
    return make_suite("rows", {"train": "train.jsonl", "reward": "rewards.py:exact", **params})


def played(it, answer, index=0, split="train"):
    """Return the first messages and the result of an answer."""

    async def play():
        env = it.episode()
        messages = await env.reset({"index": index, "split": split})
        result = env.step(answer)
        return messages, await result if hasattr(result, "__await__") else result

    return asyncio.run(play())


def refusal(**params):
    with pytest.raises(EnvError) as caught:
        suite(**params)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_three_params_are_enough_and_an_answer_is_scored(here):
    it = suite()
    messages, wrong = played(it, "x")
    question = messages[0]["content"]
    right = str(sum(int(term) for term in question.removesuffix("=").split("+")))
    assert [m["role"] for m in messages] == ["user"]
    assert (wrong.rewards, wrong.correct, wrong.done) == ({"exact": 0.0}, False, True)
    scored = played(it, right)[1]
    assert (scored.rewards, scored.correct) == ({"exact": 1.0}, True)
    assert scored.info["row"].startswith("train.jsonl:")
    assert it.demonstration(0, "train") == [*messages, {"role": "assistant", "content": right}]


@pytest.mark.parametrize("ending", ["jsonl.gz", "json", "csv"])
def test_other_formats_hold_the_same_rows(here, ending):
    name = here / f"other.{ending}"
    if ending == "csv":
        with open(name, "w", newline="") as file:
            writer = csv.DictWriter(file, list(SUMS[0]))
            writer.writeheader()
            writer.writerows(SUMS)
    else:
        text = json.dumps(SUMS) if ending == "json" else (here / "train.jsonl").read_text()
        name.write_bytes(gzip.compress(text.encode()) if ending == "jsonl.gz" else text.encode())
    one, other = suite(), suite(train=name.name)
    assert [one.demonstration(i, "train") for i in range(9)] == [
        other.demonstration(i, "train") for i in range(9)
    ]


def test_a_template_and_a_system_message(here):
    it = suite(prompt="What is {a} + {b}? {{}}", system="Be brief.", heldout=0.0)
    messages, _ = played(it, "")
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert messages[1]["content"].startswith("What is ")
    assert messages[1]["content"].endswith("? {}")


def test_a_prompt_of_messages_keeps_its_own_system_message(here):
    talk = [{"role": "system", "content": "Own."}, {"role": "user", "content": "1 + 1 ="}]
    write(here / "train.jsonl", [{"prompt": talk, "answer": "2"}])
    assert played(suite(system="Other.", heldout=0.0), "2")[0] == talk


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a"', r"train\.jsonl:2: not JSON \(.*\); write one object on each line"),
        ('["a"]', r"train\.jsonl:2: expected an object such as .*, found a list"),
        ('{"answer": "4"}', r"train\.jsonl:2: no value for 'prompt'; add it or delete the row"),
        ('{"prompt": " "}', r"train\.jsonl:2: the prompt is empty; add a text or delete the row"),
        ('{"prompt": []}', r"train\.jsonl:2: the prompt is empty; add a message"),
        (
            '{"prompt": "ab\\ud83d"}',
            r"train\.jsonl:2: character 3 of the prompt is '\\ud83d', half of a surrogate pair; correct it",
        ),
        (
            '{"prompt": [{"role": "user", "content": "\\ud83d"}]}',
            r"train\.jsonl:2: character 1 of the prompt is .*, half",
        ),
        ('{"prompt": 7}', r"train\.jsonl:2: 'prompt' is 7; it has to be a text or a list of messages"),
        (
            '{"prompt": [{"role": "bot", "content": "a"}]}',
            r"message 1 has the role 'bot'; use one of system,",
        ),
        (
            '{"prompt": [{"role": "user"}]}',
            r"message 1 is .*; write \{\"role\": \"user\", \"content\": TEXT\}",
        ),
        ('{"prompt": [{"role": "assistant", "content": "a"}]}', r"the last message is the assistant's"),
    ],
)
def test_a_bad_row_is_refused_with_file_line_and_cure(here, line, said):
    (here / "train.jsonl").write_text(f'{{"prompt": "1 + 1 =", "answer": "2"}}\n{line}\n')
    with pytest.raises(EnvError, match=said) as caught:
        suite()
    assert str(caught.value).startswith("train.jsonl:2: ")


def test_wrong_settings_are_refused_with_the_cure(here):
    assert refusal(train="trian.jsonl") == (
        "params.train: no file trian.jsonl, neither from the working folder nor beside the run file; did you mean "
        "'train.jsonl'?"
    )
    assert "rows are in a file that ends in .jsonl, .jsonl.gz, .json, .csv, .parquet" in refusal(
        train="rows.txt"
    )
    assert refusal(prompt="promt") == (
        "params.prompt = 'promt': train.jsonl has no column 'promt'; did you mean 'prompt'? (columns: prompt, answer, "
        'a, b); name one, or write a template such as "{prompt}"'
    )
    assert "no column 'c'" in refusal(prompt="{a} + {c}")
    assert "no column 'a.real'" in refusal(prompt="{a.real}")
    assert "{a} is no plain column" in refusal(prompt="{a:03d}")
    assert "write {column} for a value" in refusal(prompt="{a")
    assert "leaves none of the 100 rows" in refusal(heldout=0.999999)
    assert "at least 0 and below 1" in refusal(heldout=1.0)
    assert "no reward has this name; name one of exact" in refusal(correct="exakt")
    assert "reward file reward.py does not exist; did you mean 'rewards.py'?" in refusal(
        reward="reward.py:exact"
    )
    assert "rewards.py has no callable 'exakt'; did you mean 'exact'?" in refusal(reward="rewards.py:exakt")
    assert "name a function as" in refusal(reward={})
    assert "such as rewards.py:reward" in refusal(reward="rewards.py")
    assert refusal(solved_at="1") == "params.solved_at = '1': write a number"
    assert refusal(seed=0.5) == "params.seed = 0.5: write a number"
    assert refusal(system=1) == "params.system = 1: write a text in quotation marks"
    (here / "train.jsonl").write_text("\n")
    assert refusal() == "params.train: train.jsonl has no rows"


def test_csv_with_a_missing_value_names_the_line(here):
    (here / "t.csv").write_text("prompt,answer\n1 + 1 =,2\n1 + 2 =\n")
    assert refusal(train="t.csv").startswith("t.csv:3: not as many values as the 2 columns of line 1")


def test_a_package_that_is_missing_is_named_with_the_command(here, monkeypatch):
    (here / "t.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in ("t.parquet", "openai/gsm8k:main:train"):
        assert refusal(train=name) == (
            f"{name} needs the package datasets, which is not installed; run: pip install datasets"
        )


def test_a_data_set_of_the_hub_is_named_with_config_and_split(here, monkeypatch):
    calls = []

    def load_dataset(*args, split):
        calls.append((*args, split))
        return SUMS[:5] if split == "test" else SUMS

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    it = suite(train="openai/sums:main:train", heldout="openai/sums:test")
    assert calls == [("openai/sums", "main", "train"), ("openai/sums", None, "test")]
    assert played(it, "", 0, "heldout")[1].info == {"row": "openai/sums:test: row 1"}


def test_a_share_is_stable_under_new_rows_and_another_order(here):
    before = heldout_prompts(suite(heldout=0.25))
    write(here / "train.jsonl", [*reversed(SUMS), {"prompt": "new", "answer": "1"}])
    after = heldout_prompts(suite(heldout=0.25))
    assert 10 < len(before) < 40
    assert after - {"new"} == before
    trained = {played(suite(heldout=0.25), "", i)[0][0]["content"] for i in range(101 - len(after))}
    assert not trained & after


def heldout_prompts(it):
    size = it.facts().heldout_tasks
    return {played(it, "", i, "heldout")[0][0]["content"] for i in range(size)}


def test_equal_prompts_are_on_one_side(here):
    write(here / "train.jsonl", [{"prompt": f"{i % 7}", "answer": i} for i in range(700)])
    it = suite(heldout=0.4)
    assert 0 < it.facts().heldout_tasks < 700
    assert it.facts().heldout_tasks % 100 == 0


def test_a_prompt_of_the_heldout_file_is_not_trained(here):
    write(here / "test.jsonl", SUMS[:5])
    it = suite(heldout="test.jsonl")
    assert heldout_prompts(it) == {row["prompt"] for row in SUMS[:5]}
    assert it.facts().remarks == (
        "5 of 100 training rows have a prompt of test.jsonl, so they are not trained",
    )
    trained = {played(it, "", i)[0][0]["content"] for i in range(95)}
    assert trained == {row["prompt"] for row in SUMS[5:]}
    with pytest.raises(
        EnvError, match=r"held-out task 5: there are 5 .*lower learner\.evaluation_tasks to 5"
    ):
        it.row(5, "heldout")


def test_a_heldout_file_without_a_column_that_a_function_needs_is_refused(here):
    (here / "rewards.py").write_text("def exact(completions, answer, **kwargs):\n    return [0.0]\n")
    write(here / "test.jsonl", [{"prompt": "a", "anwser": "1"}])
    assert refusal(heldout="test.jsonl") == (
        "rewards.py:1: exact: it needs 'answer', but test.jsonl has no such column; did you mean 'anwser'? "
        "(columns: prompt, anwser)"
    )


def test_each_epoch_has_each_row_once_in_an_order_of_its_own(here):
    it, other = suite(heldout=0.0), suite(heldout=0.0)
    orders = [[it.row(i, "train").place for i in range(100 * e, 100 * e + 100)] for e in range(3)]
    assert all(len(set(order)) == 100 for order in orders)
    assert orders[0] != orders[1] != orders[2]
    # Another process, which has seen no task before, agrees.
    assert [other.row(i, "train").place for i in range(200, 300)] == orders[2]
    assert [suite(heldout=0.0, seed=1).row(i, "train").place for i in range(100)] != orders[0]
    assert it.gauges() == {}
    played(it, "", 149)
    assert it.gauges() == {"epoch": 1.5}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000])
def test_the_order_is_a_permutation(size):
    there = [permuted(i, size, "key") for i in range(size)]
    assert sorted(there) == list(range(size))
    assert [permuted(place, size, "key", back=True) for place in there] == list(range(size))
    assert position(size, size, 0)[1] == 1


def test_first_places_are_spread_evenly():
    first = Counter(permuted(0, 5, str(key)) for key in range(2000))
    assert min(first.values()) > 300, first
    shares = sum(is_heldout(str(i), 0.1) for i in range(5000)) / 5000
    assert 0.08 < shares < 0.12


def test_without_a_solution_there_is_no_demonstration(here):
    write(here / "train.jsonl", [{"prompt": "a"}])
    with pytest.raises(
        LookupError, match=r"train\.jsonl:1 has no solution in a column 'answer' or 'completion'"
    ):
        suite(heldout=0.0).demonstration(0, "train")


def test_code_of_the_user_cannot_change_a_row_for_other_episodes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = {"prompt": [{"role": "user", "content": "q"}], "tests": ["a", "b"]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "spoil.py").write_text(
        "def one(answer, row):\n    return float(len(row['tests'])) + (row['tests'].clear() or 0)\n\n"
        "def two(prompts, completions, tests, **kwargs):\n    n = len(tests[0])\n    tests[0].clear()\n"
        "    prompts[0].append({})\n    return [float(n)]\n"
    )
    reward = {"one": "spoil.py:one", "two": "spoil.py:two"}
    suite = make_suite("rows", {"train": "train.jsonl", "reward": reward, "heldout": 0.0})
    for _ in range(2):
        row, prompt, messages = suite.begin(0, "train")
        messages.clear()
        assert suite.score("x", row, prompt).rewards == {"one": 2.0, "two": 2.0}
    asyncio.run(suite.close())


def test_a_prompt_that_renders_like_a_held_out_one_is_not_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def exact(answer, row):\n    return 1.0\n")
    trained = ['{"prompt": "X"}', '{"prompt": [{"content": "X", "role": "user"}]}', '{"prompt": "Y"}']
    (tmp_path / "train.jsonl").write_text("\n".join(trained))
    (tmp_path / "test.jsonl").write_text('{"prompt": [{"role": "user", "content": "X"}]}\n')
    params = {"train": "train.jsonl", "heldout": "test.jsonl", "reward": "rewards.py:exact"}
    suite = make_suite("rows", params)
    assert {suite.begin(index, "train")[0].place for index in range(4)} == {"train.jsonl:3"}
    asyncio.run(suite.close())


def test_the_hash_of_the_content_changes_with_every_file_that_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("train.jsonl", "test.jsonl", "rewards.py", "judge.txt", "tools.py")
    for name in names:
        (tmp_path / name).write_text("1")
    judge = {"judge": "http://h/v1", "model": "m", "prompt": "judge.txt"}
    reward = {"exact": "rewards.py:exact", "good": judge}
    params = {"train": "train.jsonl", "heldout": "test.jsonl", "reward": reward}
    table = {"name": "tools", "params": {**params, "tools": "tools.py:Bash"}}
    before = content_hash("several", {"environments": [table]})
    for name in names:
        (tmp_path / name).write_text("2")
        assert content_hash("several", {"environments": [table]}) != before, name
        (tmp_path / name).write_text("1")
    assert content_hash("several", {"environments": [table]}) == before
    assert content_hash("calculator", {}) == ""


def test_a_column_gives_hints(here):
    rows = [row | {"steps": ["add", f"it is {row['answer']}"]} for row in SUMS]
    write(here / "train.jsonl", rows)
    messages, result = played(suite(hint="steps"), "x")
    right = str(sum(int(term) for term in messages[0]["content"].removesuffix("=").split("+")))
    assert result.hints == ("add", f"it is {right}")
    assert played(suite(hint="answer"), "x")[1].hints == (right,)
    assert suite(hint="answer").facts().hints is True
    assert (suite().facts().hints, played(suite(), "x")[1].hints) == (False, ())


def test_hints_that_are_none_are_refused_with_their_place(here):
    assert refusal(hint="answr") == (
        "params.hint = 'answr': train.jsonl has no column 'answr'; did you mean 'answer'? (columns: prompt, answer, a, "
        "b); name one with a solution or with hints"
    )
    write(here / "train.jsonl", [SUMS[0] | {"steps": "s"}, SUMS[1] | {"steps": {"one": 1}}])
    assert refusal(hint="steps").startswith(
        "train.jsonl:2: 'steps' is {'one': 1}; it has to be a text, or a list"
    )


CALL = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": '{"c": "Oslo"}'}}


@pytest.mark.parametrize(
    ("messages", "read"),
    [
        (
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
             {"role": "tool", "tool_call_id": "c1", "content": "rain"}],
            [{"role": "user", "content": "?"},
             {"role": "assistant", "content": "", "tool_calls": [
                 {"id": "c1", "type": "function", "function": {"name": "w", "arguments": {"c": "Oslo"}}}]},
             {"role": "tool", "content": "rain", "tool_call_id": "c1"}],
        ),
        ([{"role": "user", "content": "?", "name": None, "tool_calls": None}], [{"role": "user", "content": "?"}]),
        ([{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
          {"role": "user", "content": "?"}], [{"role": "system", "content": "ab"}, {"role": "user", "content": "?"}]),
        ([{"role": "assistant", "content": "a", "reasoning_content": "hm"}, {"role": "user", "content": "?"}],
         [{"role": "assistant", "content": "a", "reasoning_content": "hm"}, {"role": "user", "content": "?"}]),
    ],
)  # fmt: skip
def test_messages_of_a_row_are_those_that_an_agent_could_send(here, messages, read):
    """Rows and agents have one reader of messages: what one takes, the other takes, and both read the same."""
    from envs.agent.chat import parse_request

    write(here / "train.jsonl", [{"prompt": messages, "answer": "1"}])
    assert played(suite(heldout=0.0), "1")[0] == read
    asked = parse_request(json.dumps({"messages": messages}).encode()).messages
    assert asked == [{k: v for k, v in m.items() if k != "reasoning_content"} for m in read]


def test_nulls_that_a_table_fills_into_messages_are_left_out(here, monkeypatch):
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "w", "arguments": {"c": "Oslo", "unit": None}},
    }
    filled = {"role": "assistant", "content": "a", "name": None, "tool_calls": [call]}
    table = [{"prompt": [filled, {"role": "user", "content": "?", "tool_calls": None}], "answer": None}]
    module = SimpleNamespace(load_dataset=lambda *_, **__: table)
    monkeypatch.setitem(sys.modules, "datasets", module)
    (here / "t.parquet").write_bytes(b"PAR1")
    (here / "rewards.py").write_text("def exact(answer, row):\n    return float(row['answer'] is None)\n")
    messages, result = played(suite(train="t.parquet", heldout=0.0), "")
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == {"c": "Oslo"}
    assert [list(message) for message in messages] == [["role", "content", "tool_calls"], ["role", "content"]]
    assert result.rewards == {"exact": 1.0}, "the columns of a row keep theirs"


def test_a_parquet_file_with_brackets_in_its_name_is_no_pattern(here, monkeypatch):
    import glob

    def load_dataset(kind, name, *, data_files, split):
        assert glob.glob(data_files) == [str(here / "t[1].parquet")]
        return SUMS

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    (here / "t[1].parquet").write_bytes(b"PAR1")
    assert suite(train=str(here / "t[1].parquet")).facts().heldout_tasks

    def fail(*_, **__):
        raise ValueError("no data files")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fail))
    assert "cannot be read as parquet (ValueError: no data files)" in refusal(train="t[1].parquet")


def test_a_changed_parquet_file_of_equal_size_and_time_is_read_anew(here, monkeypatch):
    """The package keeps a file under its name, size and time: what it kept of another content must not come back."""
    kept = {}

    def load_dataset(kind, name, *, data_files, split):
        path = here / "t.parquet"
        key = name, path.stat().st_size, path.stat().st_mtime_ns
        return kept.setdefault(key, [{"prompt": path.read_text(), "answer": "1"}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    prompts = []
    for content in ("a", "b"):
        (here / "t.parquet").write_text(content)
        os.utime(here / "t.parquet", ns=(10**18, 10**18))
        (row,) = read_rows(str(here / "t.parquet"), "train")
        prompts.append(row.values["prompt"])
    assert prompts == ["a", "b"]


def test_numbers_of_a_table_are_written_as_people_write_them(here):
    (here / "train.jsonl").write_text(
        '{"q": 3.0, "r": 2.5, "answer": "1"}\n{"q": NaN, "r": 1, "answer": "1"}\n'
    )
    assert "train.jsonl:2: no value for 'q'" in refusal(prompt="{q} + {r}", heldout=0.0)
    (here / "train.jsonl").write_text('{"q": 3.0, "r": 2.5, "answer": "1"}\n')
    assert played(suite(prompt="{q} + {r}", heldout=0.0), "")[0][0]["content"] == "3 + 2.5"


@pytest.mark.parametrize("name", ["t.ndjson", "t.tsv", "t.json.gz", "T.JSONL", "t.data.json"])
def test_more_endings_are_read(here, name):
    lines = "".join(json.dumps(row) + "\n" for row in SUMS).encode()
    content = {
        "t.ndjson": lines,
        "T.JSONL": lines,
        "t.tsv": b"prompt\tanswer\n" + b"".join(f"{r['prompt']}\t{r['answer']}\n".encode() for r in SUMS),
        "t.json.gz": gzip.compress(json.dumps(SUMS).encode()),
        "t.data.json": json.dumps({"data": SUMS}).encode(),
    }[name]
    (here / name).write_bytes(content)
    assert suite(train=name).facts().heldout_tasks == suite().facts().heldout_tasks


def test_a_long_value_of_a_csv_file_is_read_and_depth_names_the_line(here):
    (here / "t.csv").write_text('prompt,answer\na,1\n"' + "x" * 200_000 + '",2\n')
    assert suite(train="t.csv", heldout=0.0).facts().longest_tasks[0][2] == "t.csv:3"
    (here / "train.jsonl").write_text('{"prompt": "a", "answer": "1"}\n' + '{"a":' * 100_000 + "\n")
    assert refusal().startswith("train.jsonl:2: not JSON (")


def test_equal_prompts_with_different_answers_are_told(here):
    write(
        here / "train.jsonl", [{"prompt": "1 + 1 =", "answer": answer} for answer in ("2", "2", "two", "3")]
    )
    assert suite(heldout=0.0).facts().remarks == (
        "2 rows have the prompt of another row and another answer, the first at train.jsonl:1 and train.jsonl:3",
    )
    write(here / "train.jsonl", [{"prompt": "1 + 1 =", "answer": "2"}] * 3)
    assert suite(heldout=0.0).facts().remarks == ()
