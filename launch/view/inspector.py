"""One trajectory: its turns and branches, and every token with its version, lag and weight. Pure, but for the journal.

Token ids are decoded one by one, as they were recorded. No chat template is rendered anew.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from broker.errors import JournalError
from broker.journal.files import read_place
from broker.journal.writer import Place, unpack_segment
from launch.errors import NotKept
from launch.run_file.sections import RunConfig
from launch.view.annotations import AnnotationReader
from launch.view.columns import evaluation_of, held_out_task, known_step, reward_of
from launch.view.journal_index import JournalIndex, Piece, Row
from launch.view.table import finite, row_of
from learner.annotation_files import Record
from learner.errors import BrokenTrajectory
from learner.given import GIVEN, Conversation, as_trajectory
from learner.samples import Sample
from learner.trajectory import branches_of
from protocol.codec import decode_segment, unpack_arrays
from protocol.errors import ProtocolError
from protocol.messages.episodes import Segment, Turn

MAX_TOKENS = 32_768
"""Most tokens of a trajectory that are shown; the page says so if there are more."""
MAX_EXTRA = 20_000
SIBLINGS = 64
WITH_TEXT = 16
"""Members of a group whose texts stand side by side."""
TEXT_TOKENS = 1_024

Annotations = Mapping[str, NDArray[Any]]
"""What the learner made of each token, by name, one element per token of the trajectory; NaN where it kept nothing."""


class Pieces(NamedTuple):
    """The segments of a trajectory, with their arrays joined."""

    segments: list[Segment]
    arrays: dict[str, NDArray[Any]]
    first_token: int
    """Number of the first token that is there; above 0 if earlier segments are deleted."""


class Words:
    """The texts of single tokens, remembered by id.

    Args:
        tokenizer: None if the run's tokenizer cannot be found; then tokens are shown by their ids.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    @property
    def known(self) -> bool:
        return self._tokenizer is not None

    def word(self, token: int) -> str | None:
        """Return the text of one token. A part of a character is shown by the tokenizer's own name of the token."""
        if self._tokenizer is None:
            return None
        text = self._known.get(token)
        if text is None:
            text = str(self._tokenizer.decode([token], skip_special_tokens=False))
            if not text or "\ufffd" in text:
                text = self._tokenizer.id_to_token(token) or f"<{token}>"
            self._known[token] = text
        return text

    def text(self, tokens: Sequence[int]) -> str | None:
        """Return the text of several tokens, special ones included."""
        if self._tokenizer is None:
            return None
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def open_words(
    folder: Path, config: RunConfig | None, known: tuple[Sequence[int], str] | None = None
) -> Words:
    """Return the texts of a run's tokens, from a tokenizer on this machine. Nothing is downloaded, and no code is run.

    Args:
        known: token ids of which the learner wrote the text; a tokenizer that makes another text of them is not the
            run's. None: the first one is taken.
    """
    for path in _tokenizer_files(folder, config):
        try:
            words = Words(Tokenizer.from_file(str(path)))
            if known is None or words.text(known[0]) == known[1]:
                return words
        except Exception:
            # The tokenizers library raises bare Exception. The next place may have a file that can be read.
            continue
    return Words(None)


def _tokenizer_files(folder: Path, config: RunConfig | None) -> list[Path]:
    places = [folder / "model", *sorted((folder / "models").glob("*step-*"), reverse=True)]
    if config is not None:
        # The run file's folder of models is relative to the folder in which the run began.
        caches = [config.model.cache, folder.resolve().parent / config.model.cache.name]
        if config.model.path:
            places += [Path(config.model.path), *(cache / config.model.path for cache in caches)]
        places += [place for cache in caches for place in sorted(cache.glob("tiny-*"))]
    return [file for place in places if (file := place / "tokenizer.json").is_file()]


def known_text(samples: Sequence[Sample], index: JournalIndex) -> tuple[list[int], str] | None:
    """Return token ids of a prompt in the journal, and the text that the learner made of them; None without one."""
    for sample in reversed(samples[-200:]):
        first = sample.parts[0] if sample.parts else None
        row = next((r for r in index.groups.get(sample.group, ()) if r.task == sample.task), None)
        if first is None or row is None or "left out]" in first.text:
            continue
        try:
            pieces = read_pieces(index.folder, row)
        except NotKept:
            continue
        ids = pieces.arrays["token_ids"][: first.tokens].tolist()
        if len(ids) == first.tokens:
            return ids, first.text
    return None


@dataclass(slots=True, kw_only=True)
class RowOfFile(Row):
    """An answer that the learner read from a file. The journal has none of it; its annotations have its tokens."""

    content: Pieces


def row_of_file(record: Record) -> RowOfFile:
    """Return an answer that was read from a file as a trajectory."""
    own = record.trajectory
    learnt = np.zeros(len(own.token_ids), np.bool_)
    learnt[own.places] = True
    t = as_trajectory(Conversation("", np.array(own.token_ids, np.int32), learnt), own.trajectory_id)
    segment = Segment(
        trajectory_id=own.trajectory_id,
        task_id=own.trajectory_id,
        group_id=own.group,
        group_size=1,
        index=0,
        offset=0,
        tokens=len(learnt),
        action_tokens=own.rows,
        status="finished",
        turns=list(t.turns),
    )
    piece = Piece(
        0,
        Place(0, 0, 0),
        segment.tokens,
        own.rows,
        (),
        record.of.time,
        outcome="trained",
        step=record.of.step,
    )
    return RowOfFile(
        own.trajectory_id,
        "",
        own.group,
        1,
        GIVEN,
        "train",
        "",
        math.nan,
        status="finished",
        turns=len(t.turns),
        pieces=[piece],
        content=Pieces([segment], {name: getattr(t, name) for name in TOKEN_ARRAYS}, 0),
    )


def read_pieces(folder: Path, row: Row) -> Pieces:
    """Return the segments of a trajectory, from the journal or, of an answer that was read from a file, as they are.

    Raises:
        NotKept: they are deleted, or cannot be read.
    """
    if isinstance(row, RowOfFile):
        return row.content
    segments, parts = list[Segment](), list[Mapping[str, NDArray[Any]]]()
    first = 0
    for piece in row.pieces:
        try:
            header, body = unpack_segment(read_place(folder, piece.place))
            segment = decode_segment(header)
            arrays = unpack_arrays(segment.arrays, body)
        except (JournalError, ProtocolError, OSError) as error:
            if segments:
                raise NotKept(f"trajectory {row.trajectory}, segment {piece.index}: {error}") from None
            continue
        if not segments:
            first = segment.offset
        segments.append(segment)
        parts.append({name: arrays[name] for name in TOKEN_ARRAYS if name in arrays})
    if not segments:
        when = f" It was last used at step {row.step}." if row.step >= 0 else ""
        raise NotKept(
            f"trajectory {row.trajectory}: its file of the journal is deleted.{when} Keep more with "
            "broker.journal.keep_bytes"
        )
    joined = {
        name: np.concatenate([part[name] for part in parts])
        for name in TOKEN_ARRAYS
        if all(name in p for p in parts)
    }
    return Pieces(segments, joined, first)


TOKEN_ARRAYS = ("token_ids", "action_mask", "logp_behaviour", "policy_version")


def inspector_page(
    index: JournalIndex,
    row: Row,
    pieces: Pieces,
    words: Words,
    config: RunConfig | None,
    samples: Sequence[Sample],
    kept: AnnotationReader,
) -> dict[str, Any]:
    """Return a trajectory with all its tokens.

    Args:
        samples: those of the run; this trajectory's have the return, the advantage and the answer.
        kept: what the learner made of each token, where it kept it.
    """
    annotations = kept.of(row.trajectory, row.tokens + pieces.first_token)
    first, last = pieces.segments[0], pieces.segments[-1]
    ids = pieces.arrays["token_ids"][:MAX_TOKENS]
    turns = join_turns(pieces.segments)
    own = [s for s in samples if s.task == row.task and (row.step < 0 or s.step in (row.step, row.step - 1))]
    sample = own[-1] if own else None
    return {
        **row_of(row, index, config, bool(own)),
        "attempt": row.trajectory.rpartition(".")[2],
        "temperature": finite(row.temperature),
        "origin": kept.origin(row.trajectory),
        "generators": list(dict.fromkeys(segment.generator for segment in pieces.segments)),
        "failure": row.failure or last.error,
        "first_token": pieces.first_token,
        "all_tokens": pieces.first_token + len(pieces.arrays["token_ids"]),
        "words_known": words.known,
        "turns": [_turn(turn, pieces, words, first.offset) for turn in turns],
        "branches": branches(turns, pieces),
        "turn_rewards": [
            {"name": reward.name, "turn": reward.turn, "value": finite(reward.value)}
            for segment in pieces.segments
            for reward in segment.rewards
        ],
        "marks": [
            {"name": mark.name, "turn": mark.turn, "value": mark.value}
            for segment in pieces.segments
            for mark in segment.marks
        ],
        "auxiliary": last.auxiliary,
        "times": turn_times(pieces.segments),
        "extra": json.dumps(msgspec.to_builtins(_extra(pieces.segments)), ensure_ascii=False, default=repr)[
            :MAX_EXTRA
        ],
        "tokens": token_columns(index, row, pieces, words, ids, annotations),
        "annotated": annotations is not None,
        "bound": None if config is None else config.max_policy_lag,
        "sample": None if sample is None else _sample(sample),
        # The environment's own words, which every trajectory has; samples are a few of a step.
        "answer": _text_of(last, "answer"),
        "target": _text_of(last, "target"),
        "siblings": siblings(index, row, config, words, kept),
    }


def _extra(segments: Sequence[Segment]) -> dict[str, Any]:
    return {key: value for segment in segments for key, value in segment.extra.items()}


def _text_of(last: Segment, name: str) -> str | None:
    text = last.extra.get(name)
    return text if isinstance(text, str) else None


def join_turns(segments: Sequence[Segment]) -> list[Turn]:
    """Return the turns of a trajectory in order; a turn that segment boundaries cut is one turn."""
    joined: dict[int, Turn] = {}
    for segment in segments:
        for turn in segment.turns:
            before = joined.get(turn.index)
            start = turn.start if before is None else before.start
            joined[turn.index] = msgspec.structs.replace(turn, start=start)
    return [joined[index] for index in sorted(joined)]


def _turn(turn: Turn, pieces: Pieces, words: Words, offset: int) -> dict[str, Any]:
    ids = pieces.arrays["token_ids"][max(0, turn.start - offset) : max(0, turn.end - offset)][:MAX_TOKENS]
    return {
        "index": turn.index,
        "action": turn.action,
        "back": turn.back,
        "start": turn.start - offset,
        "end": turn.end - offset,
        "text": words.text(ids.tolist()),
    }


def branches(turns: Sequence[Turn], pieces: Pieces) -> list[list[int]]:
    """Return the turns of each branch, by their index; one branch if the trajectory does not branch."""
    everything = [turn.index for turn in turns]
    if pieces.first_token or all(turn.back == 1 for turn in turns):
        return [everything]
    try:
        found = branches_of(turns, len(pieces.arrays["token_ids"]))
    except BrokenTrajectory:
        return [everything]
    starts = {turn.start: turn.index for turn in turns if turn.end > turn.start}
    return [[starts[place] for place in branch.places.tolist() if place in starts] for branch in found]


def turn_times(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    """Return the seconds of each turn: waited for an engine, sampled, in tools; empty if nobody measured them."""
    sums: dict[int, list[float]] = {}
    for segment in segments:
        for time in segment.times:
            total = sums.setdefault(time.turn, [0.0, 0.0, 0.0])
            for i, seconds in enumerate((time.waited, time.sampled, time.tools)):
                total[i] += seconds
    return [{"turn": t, "waited": w, "sampled": s, "tools": o} for t, (w, s, o) in sorted(sums.items())]


def token_columns(
    index: JournalIndex,
    row: Row,
    pieces: Pieces,
    words: Words,
    ids: NDArray[Any],
    annotations: Annotations | None,
) -> dict[str, list[Any]]:
    """Return one list per fact about tokens; None where a fact is not known."""
    arrays, count = pieces.arrays, len(ids)
    action = arrays["action_mask"][:count] > 0
    # What a teacher wrote has neither a version nor a behaviour probability.
    sampled = action & (arrays["policy_version"][:count] >= 0)
    versions = arrays["policy_version"][:count].tolist()
    columns: dict[str, list[Any]] = {
        "id": ids.tolist(),
        "word": [words.word(token) for token in ids.tolist()],
        "action": [bool(x) for x in action],
        "version": [version if acts else None for version, acts in zip(versions, sampled, strict=True)],
        "logp": masked(arrays["logp_behaviour"][:count], sampled),
        "lag": lags(index, row, pieces, action),
    }
    for name, values in (annotations or {}).items():
        columns[name] = [_known(value) for value in values[pieces.first_token :][:count].tolist()]
    return columns


def masked(values: NDArray[Any], action: NDArray[np.bool_]) -> list[float | None]:
    """Return values of action tokens, and None for the others and for what is not finite."""
    return [
        _known(value) if acts else None for value, acts in zip(values.tolist(), action.tolist(), strict=True)
    ]


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def lags(index: JournalIndex, row: Row, pieces: Pieces, action: NDArray[np.bool_]) -> list[int | None]:
    """Return the policy lag of each token when its segment was trained; None where it was not."""
    of_piece = {}
    for piece in row.pieces:
        if piece.lags:
            # The pieces keep lags in the order of their versions.
            of_piece[piece.index] = dict(
                zip((v for v, _ in piece.versions), (lag for lag, _ in piece.lags), strict=True)
            )
    found: list[int | None] = []
    versions = pieces.arrays["policy_version"]
    at = 0
    for segment in pieces.segments:
        known = of_piece.get(segment.index, {})
        found += [known.get(version) for version in versions[at : at + segment.tokens].tolist()]
        at += segment.tokens
    return [lag if acts else None for lag, acts in zip(found[: len(action)], action.tolist(), strict=True)]


def _sample(sample: Sample) -> dict[str, Any]:
    return {
        "step": sample.step,
        "chosen": sample.chosen,
        "return": finite(sample.return_),
        "advantage": sample.advantage,
        "end": sample.end,
    }


def siblings(
    index: JournalIndex, row: Row, config: RunConfig | None, words: Words, kept: AnnotationReader
) -> list[dict[str, Any]]:
    """Return the members of the trajectory's group, and for a held-out task its answers in all evaluations.

    Answers that were read from a file come first, because they are few.

    The first `WITH_TEXT` have what they wrote.
    """
    found = held_out_task(row)
    if found is None:
        members = [*map(row_of_file, kept.of_files(row.group)), *index.groups.get(row.group, [])]
    else:
        members = [other for other in index.rows if held_out_task(other) == found]
    return [
        {
            "trajectory": other.trajectory,
            "reward": finite(reward_of(other, config)),
            "correct": other.correct,
            "status": other.status,
            "length": other.action_tokens,
            "step": known_step(other),
            "outcome": other.outcome,
            "evaluation": one[0] if (one := evaluation_of(other)) else None,
            "text": written(index, other, words) if place < WITH_TEXT else None,
        }
        for place, other in enumerate(members[:SIBLINGS])
    ]


def written(index: JournalIndex, row: Row, words: Words) -> str | None:
    """Return what was sampled in a trajectory, turns separated by lines; None if its tokens are not there."""
    try:
        pieces = read_pieces(index.folder, row)
    except NotKept:
        return None
    ids, offset = pieces.arrays["token_ids"], pieces.segments[0].offset
    turns = [turn for turn in join_turns(pieces.segments) if turn.action]
    parts = [ids[max(0, turn.start - offset) : turn.end - offset] for turn in turns]
    texts = [words.text(part[:TEXT_TOKENS].tolist()) for part in parts]
    return "\n".join(text for text in texts if text is not None) if words.known else None
