"""Needle questions through a real server: cold, on a prefix hit, after eviction; near-identical
distractors. Two bits must find what SGLang's own float32 cache finds."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from tests.support.server import Server
from tests.support.vectors import DATA

pytestmark = pytest.mark.sglang

CODE = 946
IS = [313, 223]  # " is ", then the code: one token a digit
ZERO = 18
DIGITS = 5
SINK, RECENT = 64, 256  # int2's defaults


@dataclass
class Document:
    """Token ids and (position of the code, question, code) of what is asked about it."""

    ids: list[int]
    questions: list[tuple[int, list[int], list[int]]]

    @staticmethod
    def read(entry: dict) -> Document:
        ids, questions = entry["document"], []
        for q in entry["questions"]:
            prompt = q["prompt"]  # What is the code of NAME? ... The code of NAME is
            at = find(ids, prompt[prompt.index(CODE, prompt.index(CODE) + 1) :])
            assert ids[at : at + DIGITS] == q["answer_ids"]
            questions.append((at, q["prompt"], q["answer_ids"]))
        return Document(ids, sorted(questions))

    def with_codes(self, codes: dict[int, list[int]]) -> Document:
        """The same document with other codes, {position: code}."""
        ids = list(self.ids)
        for at, code in codes.items():
            ids[at : at + DIGITS] = code
        return Document(ids, [(at, q, ids[at : at + DIGITS]) for at, q, _ in self.questions])


def find(ids: list[int], words: list[int]) -> int:
    """Position after the only occurrence of ``words``."""
    found = [i for i in range(len(ids)) if ids[i : i + len(words)] == words]
    assert len(found) == 1
    return found[0] + len(words)


def code_positions(ids: list[int]) -> list[int]:
    after = [i + 2 for i in range(len(ids)) if ids[i : i + 2] == IS]
    digits = range(ZERO, ZERO + 10)
    return [i for i in after if all(t in digits for t in ids[i : i + DIGITS])]


def lookalikes(document: Document) -> tuple[Document, Document]:
    """Two documents whose codes all differ from one another in one or two digits. The second
    has the first's later codes, each under another name: a common prefix in the radix tree, and
    every wrong answer stands in the neighbour's slots."""
    where = code_positions(document.ids)
    base = document.ids[where[0] : where[0] + DIGITS]
    codes = [list(base) for _ in where]
    for i, code in enumerate(codes):
        code[i % DIGITS] = ZERO + (code[i % DIGITS] - ZERO + 1 + i // DIGITS) % 10
    assert len({tuple(c) for c in codes}) == len(codes)
    late = len(where) // 3
    turned = codes[:late] + codes[late + 1 :] + codes[late : late + 1]
    return (
        document.with_codes(dict(zip(where, codes, strict=True))),
        document.with_codes(dict(zip(where, turned, strict=True))),
    )


def ask(server: Server, document: Document, question: list[int], code: list[int]):
    """Whether the code was found, and how many prompt tokens came from the cache."""
    reply = server.generate(document.ids + question, len(code))
    return reply["output_ids"] == code, reply["meta_info"]["cached_tokens"]


Found = dict[tuple[int, int], bool]  # (document, position of the code) -> found


def on_prefix_hits(server: Server, documents: list[Document]) -> Found:
    """All questions of a document, after one that brought it into the cache."""
    found = {}
    for d, document in enumerate(documents):
        server.generate(document.ids)
        for at, question, code in document.questions:
            found[d, at], cached = ask(server, document, question, code)
            assert cached >= len(document.ids) - RECENT  # which int2 computes again
    return found


def cold(server: Server, documents: list[Document]) -> Found:
    """The first and the last question of each document, each on an empty cache."""
    found = {}
    for d, document in enumerate(documents):
        for at, question, code in document.questions[:: len(document.questions) - 1]:
            server.flush()
            found[d, at], cached = ask(server, document, question, code)
            assert cached == 0
    return found


def evicted(server: Server, documents: list[Document]) -> Found:
    """Two rounds through a pool that holds one and a half documents: each time the document is
    prefilled again, the second of a pair on the prefix that the two share."""
    found, hits = {}, []
    server.flush()
    for i in (1, 2):
        for d, document in enumerate(documents):
            at, question, code = document.questions[i]
            found[d, at], cached = ask(server, document, question, code)
            assert cached < len(document.ids) - RECENT
            hits.append(cached > 0)
    assert 0 < sum(hits) < len(hits), "both full and shared prefills were meant"
    return found


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    entries = json.loads((DATA / "nano_recall.json").read_text())
    return [Document.read(e) for e in entries if e["context"] == 1024]


def test_documents_are_as_described(documents):
    for document in documents:
        one, other = lookalikes(document)
        where = code_positions(one.ids)
        split = next(i for i, (a, b) in enumerate(zip(one.ids, other.ids, strict=True)) if a != b)
        assert where[0] < split < where[-1] and len(where) == 8
        for doc in (one, other):
            codes = [doc.ids[at : at + DIGITS] for at in where]
            assert len(set(map(tuple, codes))) == 8
            for a in codes:
                assert all(sum(x != y for x, y in zip(a, b, strict=True)) <= 2 for b in codes)
        # All are asked from the 2-bit history: behind the sink, out of the recent window.
        end = len(document.ids) - RECENT
        assert split < end and all(SINK <= at < end for at, _, _ in document.questions)
    depths = [at / len(d.ids) for d in documents for at, _, _ in d.questions]
    assert min(depths) < 0.1 and max(depths) > 0.6


def test_needles_are_found_like_in_the_exact_cache(nano, documents, tmp_path):
    """Noise: in each way of asking one answer, or one in 20, may be lost to the exact cache."""
    alike = [d for pair in map(lookalikes, documents[:2]) for d in pair]
    others = documents[3:]
    flags = ["--dtype", "float32", "--max-running-requests", "2", "--max-total-tokens", "1500"]
    env = {"OSCAR_SGLANG_CACHE": str(tmp_path / "cache")}
    log = tmp_path / "int2.log"
    with Server(nano, tmp_path / "log", *flags, "--attention-backend", "torch_native") as server:
        plain, exact = on_prefix_hits(server, others), on_prefix_hits(server, alike)
    with Server(nano, log, *flags, "--kv-cache-dtype", "int2", env=env) as server:
        ways = {
            "plain, prefix hit": (on_prefix_hits(server, others), plain),
            "prefix hit": (on_prefix_hits(server, alike), exact),
            "cold": (cold(server, alike), exact),
            "evicted": (evicted(server, alike), exact),
        }
        assert server.state()["sink_hits"] > 0
    assert "calibrating codec feedback" in log.read_text()
    for name, (found, reference) in ways.items():
        right, of, exactly = sum(found.values()), len(found), sum(reference[k] for k in found)
        print(f"{name}: {right} of {of}, exact cache {exactly}")
        assert exactly >= 0.85 * of, "the questions are too hard to say anything"
        assert right >= exactly - max(1, of // 20), name
