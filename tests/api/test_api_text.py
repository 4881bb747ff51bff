"""Text from tokens: bytes of tokens, incremental decoding, and the pieces that a choice releases."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from api_server import serve_api
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import byte_level, sentencepiece

from server.api import long_texts
from server.api.choice import Choice, Delta, TextRules
from server.api.detokenizer import Detokenizer
from server.api.errors import ApiError
from server.api.long_texts import LONG_TEXT
from server.api.template_renderer import TemplateRenderer
from server.api.tokenising import TextCodec
from server.checkpoint.token_bytes import TokenBytes
from server.messages import RequestOutput

BYTE_LEVEL = TokenBytes(byte_level())
SENTENCEPIECE = TokenBytes(sentencepiece())
ids = st.lists(st.integers(0, byte_level().tokenizer.get_vocab_size() - 1), max_size=40)


@given(ids, st.booleans())
def test_byte_level_text_is_that_of_the_tokenizers_library(token_ids: list[int], skip: bool) -> None:
    expected = byte_level().tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip) == expected


@given(ids)
def test_pieces_join_to_the_whole(token_ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, skip_special_tokens=True)
    pieces = [detokenizer.feed(token_id) for token_id in token_ids]
    text = "".join([*pieces, detokenizer.flush()])
    assert text == BYTE_LEVEL.decode(token_ids, skip_special_tokens=True)


@given(st.text(alphabet="the ll,.!漢🙂", min_size=1, max_size=30))
def test_sentencepiece_text_is_that_of_the_tokenizers_library(text: str) -> None:
    token_ids = sentencepiece().tokenizer.encode(text).ids
    expected = sentencepiece().tokenizer.decode(token_ids)
    assert SENTENCEPIECE.decode(token_ids, skip_special_tokens=True) == expected


def test_a_generated_word_keeps_its_space() -> None:
    choice = Choice(0, SENTENCEPIECE, TextRules())
    token_ids = sentencepiece().tokenizer.encode("the", add_special_tokens=False).ids
    delta = choice.feed(RequestOutput(1, token_ids, finish_reason="length"))
    assert delta is not None
    assert delta.text == " the"


def run(token_ids: list[int], bursts: list[int], rules: TextRules, echo: list[int] | None = None) -> list[Delta]:
    """Feed tokens in bursts, as an engine would that stops at the end of `token_ids`."""
    choice = Choice(0, BYTE_LEVEL, rules)
    if echo is not None:
        choice.echo(echo, frozenset(), text_prompt=False)
    deltas: list[Delta] = []
    position = 0
    sizes = iter(bursts)
    while not choice.finished:
        size = next(sizes, 1)
        part = token_ids[position : position + size]
        position += size
        finish = "length" if position >= len(token_ids) else None
        delta = choice.feed(RequestOutput(1, part, finish_reason=finish))
        if delta is not None:
            deltas.append(delta)
    assert choice.released_tokens == choice.completion_tokens
    return deltas


@given(
    ids,
    st.lists(st.integers(1, 5), max_size=10),
    st.integers(0, 12),
    st.booleans(),
    st.lists(st.integers(0, 60), min_size=2, max_size=6),
    st.one_of(st.none(), ids),
)
def test_however_tokens_arrive_the_choice_is_the_same(
    token_ids: list[int],
    bursts: list[int],
    min_tokens: int,
    include_stop: bool,
    edges: list[int],
    echo: list[int] | None,
) -> None:
    whole_text = BYTE_LEVEL.decode(token_ids, skip_special_tokens=True)
    stops = [whole_text[a : a + 1 + b % 6] for a, b in zip(edges, edges[1:], strict=False)]
    rules = TextRules(tuple(filter(None, stops)), min_tokens, include_stop)
    one_by_one = run(token_ids, [], rules, echo)
    in_bursts = run(token_ids, bursts, rules, echo)
    at_once = run(token_ids, [len(token_ids) + 1], rules, echo)
    texts = {"".join(delta.text for delta in deltas) for deltas in (one_by_one, in_bursts, at_once)}
    assert len(texts) == 1
    for deltas in (one_by_one, in_bursts, at_once):
        tokens = [token for delta in deltas for token in delta.tokens]
        assert [t.token_id for t in tokens] == [t.token_id for d in at_once for t in d.tokens]
        assert "".join(token.text for token in tokens) == "".join(delta.text for delta in deltas)
        assert all("".join(t.text for t in delta.tokens) == delta.text for delta in deltas)
        offset = 0
        for token in tokens:
            assert token.offset == offset
            offset += len(token.text)
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (
            at_once[-1].finish_reason,
            at_once[-1].stop_reason,
        )
        text = "".join(delta.text for delta in deltas)
        if "�" not in text:
            assert b"".join(token.data for token in tokens).decode() == text


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_never_shows_a_part(include: bool) -> None:
    token_ids = byte_level().tokenizer.encode("The answer is 42. What", add_special_tokens=False).ids
    deltas = run(token_ids, [], TextRules(("r is 4",), include_stop=include))
    text = "".join(delta.text for delta in deltas)
    assert text == ("The answer is 4" if include else "The answe")
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "r is 4")
    assert all("answe".startswith(delta.text.split(" ")[-1]) or include for delta in deltas[1:])


def test_a_stop_counts_only_from_min_tokens_on() -> None:
    token_ids = byte_level().tokenizer.encode("the the the the", add_special_tokens=False).ids
    deltas = run(token_ids, [], TextRules(("the",), min_tokens=len(token_ids)))
    assert "".join(delta.text for delta in deltas) == "the the the "
    assert sum(len(delta.tokens) for delta in deltas) == len(token_ids)


def codec(bos: bool = True) -> TextCodec:
    return TextCodec(byte_level(bos), 400, TemplateRenderer())


def test_there_is_one_bos_even_when_the_text_brings_its_own() -> None:
    for text in ("Hello", "<|bos|>Hello"):
        prompt = codec().encode_prompts([text], add_special_tokens=True, keep_last=None, max_tokens=100)[0]
        assert prompt.token_ids.count(0) == 1
        assert prompt.token_ids[0] == 0


def test_truncation_keeps_the_last_tokens() -> None:
    whole = codec().encode_text("Hello world, hello there!", add_special_tokens=True)
    for prompt in ("Hello world, hello there!", whole):
        kept = codec().encode_prompts([prompt], add_special_tokens=True, keep_last=3, max_tokens=100)[0]
        assert kept.token_ids == whole[-3:]


@pytest.mark.parametrize("beginning", ["", "<|bos|>"])
def test_long_texts_are_tokenised_elsewhere_alike(beginning: str, tmp_path: Path) -> None:
    """The right tokens are those of the same text's codec without a file, which has no other process to ask."""
    files = byte_level(bos=True)
    files.tokenizer.save(str(tmp_path / "tokenizer.json"))
    elsewhere = TextCodec(replace(files, path=tmp_path / "tokenizer.json"), 400, TemplateRenderer())
    text = beginning + "Hello world, 漢字 and 🙂! " * (LONG_TEXT // 20)
    for add_special_tokens in (True, False):
        ids = elsewhere.encode_text(text, add_special_tokens=add_special_tokens)
        assert isinstance(ids, array)
        assert ids.tolist() == codec().encode_text(text, add_special_tokens=add_special_tokens)
        options = {"add_special_tokens": add_special_tokens, "max_tokens": 100}
        for keep_last in (3, 10**7):
            prompts = [one.encode_prompts([text], keep_last=keep_last, **options) for one in (elsewhere, codec())]
            assert prompts[0] == prompts[1]
            assert isinstance(prompts[0][0].token_ids, list)


def test_a_text_that_takes_too_long_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = byte_level()
    files.tokenizer.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(long_texts, "_CPU_SECONDS", 1.5)
    elsewhere = TextCodec(replace(files, path=tmp_path / "tokenizer.json"), 400, TemplateRenderer())
    with pytest.raises(ApiError, match=r"could not be tokenised within 1\.5 seconds") as caught:
        elsewhere.encode_text("x y " * 8 * LONG_TEXT, add_special_tokens=False)
    assert caught.value.status == 400
    assert len(elsewhere.encode_text("x y " * (LONG_TEXT // 4), add_special_tokens=False)) > 1


async def test_a_long_text_is_counted_and_shown_whole(tmp_path: Path) -> None:
    files = byte_level()
    files.tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "Hello world. " * (LONG_TEXT // 12)
    async with serve_api(files=replace(files, path=tmp_path / "tokenizer.json")) as api:
        answer = (await api.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["tokens"] == api.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])


def test_bad_words_are_banned_at_the_start_and_after_a_space() -> None:
    encode = byte_level().tokenizer.encode
    assert set(codec().encode_words(["world"])) == {tuple(encode("world").ids), tuple(encode(" world").ids)}
