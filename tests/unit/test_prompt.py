"""Prompts: four shapes, length rules, messages, templates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from nanoserve.api import template_sandbox
from nanoserve.api.chat_template import ChatTemplate
from nanoserve.api.encoding import Encoder
from nanoserve.api.model import ServedModel
from nanoserve.api.prompt import Prompt, encode_prompts, fit_max_tokens, normal_messages, parse_prompt
from nanoserve.errors import RequestError
from nanoserve.hub.model_files import GenerationDefaults
from nanoserve.ipc.messages import EngineFacts
from nanoserve.tokenizer import NoTokenizer


@pytest.mark.rule(24)
def test_four_shapes() -> None:
    assert parse_prompt(b' "a b" ')[0].text == "a b"
    assert [p.text for p in parse_prompt(b'[ "a", "b"]')] == ["a", "b"]
    assert parse_prompt(b"[1, 2]")[0].ids == [1, 2]
    assert [p.ids for p in parse_prompt(b"[ [1], [2, 3]]")] == [[1], [2, 3]]


@pytest.mark.rule(24)
@pytest.mark.parametrize(
    "raw",
    [b"null", b"[]", b"3", b"{}", b"true", b"[true]", b"[1.5]", b'[3,"x"]', b'["x",3]', b"[[1],2]", b"[1,[2]]",
     b'[["a"]]', b"[[1.5]]", b"[[true]]", b"[null]", b'"\\ud800"', b"[1e2]"],
)  # fmt: skip
def test_anything_else_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_prompt(raw)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize(
    ("raw", "words"),
    [(b'["x",3]', "expected str, got int"), (b'["x",["y"]]', "expected str, got array"),
     (b'[3,"x"]', "expected int, got str"), (b"[[1],2]", "expected array, got int")],
)  # fmt: skip
def test_a_mixed_list_is_told_what_a_list_may_be(raw: bytes, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_prompt(raw)
    shapes = "`prompt` must be a string, a list of strings, token ids, or a list of them"
    assert caught.value.message == f"{shapes}, all alike: {words}."


@pytest.mark.rule(26, 28)
def test_length_rules() -> None:
    assert fit_max_tokens(10, 5, 16, 100, clip=False) == 5
    assert fit_max_tokens(10, None, 16, 100, clip=False) == 16
    assert fit_max_tokens(95, None, 16, 100, clip=False) == 5  # the default never makes a request too long
    assert fit_max_tokens(10, None, None, 100, clip=False) == 90
    assert fit_max_tokens(99, 1, 16, 100, clip=False) == 1
    assert fit_max_tokens(50, 500, None, 100, clip=True) == 50
    assert fit_max_tokens(100, 0, None, 100, clip=False) == 0  # scoring needs no room
    for num_prompt, asked in ((100, 1), (101, 0), (100, None)):
        with pytest.raises(RequestError) as caught:
            fit_max_tokens(num_prompt, asked, 16, 100, clip=False)
        assert "maximum context length is 100 tokens" in caught.value.message
    with pytest.raises(RequestError) as caught:
        fit_max_tokens(90, 11, 16, 100, clip=False)
    assert "101 tokens (90 in the prompt, 11 for the completion)" in caught.value.message


@pytest.mark.rule(20)
def test_parts_equal_the_joined_string() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert normal_messages([{"role": "user", "content": parts}]) == normal_messages(
        [{"role": "user", "content": "a b"}]
    )


@pytest.mark.rule(17)
@pytest.mark.parametrize(
    "messages",
    [None, [], [{}], [{"role": 3, "content": "x"}], [{"role": "user"}], [{"role": "user", "content": 3}],
     [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
     [{"role": "user", "content": [{"text": "x"}]}], [{"role": "user", "content": [None]}],
     [{"role": "assistant", "content": None}], [{"role": "user", "content": [{"type": 3, "text": "x"}]}]],
)  # fmt: skip
def test_messages_that_are_refused(messages: object) -> None:
    with pytest.raises(RequestError):
        normal_messages(messages)  # type: ignore[arg-type]


def test_tool_messages_pass_through() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert normal_messages([call])[0]["tool_calls"] == [{"id": "1"}]


SOURCE = """{{ bos_token }}{%- for m in messages %}
    {%- if m.role == 'system' and loop.index0 > 0 %}{{ raise_exception('System first') }}{% endif %}
    {%- if m.role == 'stop' %}{% break %}{% endif %}
[{{ m.role }}] {% generation %}{{ m['content'] | trim }}{% endgeneration %}
{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}{{ extra }}"""


def test_template_semantics() -> None:
    template = ChatTemplate(SOURCE, {"bos_token": "<s>"})
    messages = [{"role": "user", "content": " a "}, {"role": "stop", "content": ""}]
    assert template.render(messages) == "<s>[user] a[assistant]"
    assert template.render(messages, add_generation_prompt=False, kwargs={"extra": "!"}) == "<s>[user] a!"
    with pytest.raises(RequestError, match="System first"):
        template.render([*messages[:1], {"role": "system", "content": "x"}])


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    messages = [{"role": "developer", "content": "a"}]
    assert ChatTemplate(SOURCE, {}).render(messages, add_generation_prompt=False) == "[system] a"
    knows = SOURCE + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert ChatTemplate(knows, {}).render(messages, add_generation_prompt=False) == "[developer] a!"


def test_final_message_is_continued() -> None:
    template = ChatTemplate(SOURCE, {"bos_token": "<s>"})
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Sure, "}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<s>[user] a[assistant] Sure,"


@pytest.mark.rule(18)
@pytest.mark.parametrize("name", ["messages", "bos_token", "add_generation_prompt", "raise_exception"])
def test_arguments_cannot_replace_what_the_server_sets(name: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(SOURCE, {"bos_token": "<s>"}).render([{"role": "user", "content": "a"}], kwargs={name: "x"})


@pytest.mark.rule(18)
@pytest.mark.parametrize(
    "source",
    ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}",
     "{{ messages[0].x.y.z }}",
     "{{ 1 + 'a' }}", "{{ range(10**9) | list }}"],
)  # fmt: skip
def test_sandbox_turns_trouble_into_a_400(source: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "a"}])


LOOPS = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)
GROWS = "{% set n = namespace(s='x') %}{% for i in range(90) %}{% set n.s = n.s OP n.s %}{% endfor %}"


@pytest.mark.rule(18)
@pytest.mark.parametrize(
    ("source", "words"),
    [
        (LOOPS, "too many steps"),
        ("{% for m in messages | selectattr('role') recursive %}{{ loop(messages) }}{% endfor %}", "RecursionError"),
        (GROWS.replace("OP", "+"), "grows too long"),
        (GROWS.replace("OP", "~"), "grows too long"),
        ("{{ messages[0].content * 10**9 }}", "grows too long"),
        ("{{ 'x' * 10**9 }}", "grows too long"),
        ("{{ 9 ** 99999 }}", "grows too large"),
        ("{% for i in range(9999) %}{{ 'x' * 99999 }}{% endfor %}", "too long"),
    ],
)
def test_a_template_that_would_never_end_is_a_400(source: str, words: str) -> None:
    template = ChatTemplate(source, {})
    for _ in range(2):  # the first time takes nothing from the second
        with pytest.raises(RequestError, match=words):
            template.render([{"role": "user", "content": "abc"}])


@pytest.mark.rule(18)
def test_a_macro_that_would_never_end_is_a_400(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 100_000)  # so many calls as there are steps take seconds
    source = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}"
    template = ChatTemplate(source, {})
    for _ in range(2):
        with pytest.raises(RequestError, match="too many steps"):
            template.render([{"role": "user", "content": "abc"}])


def test_bounds_change_no_meaning() -> None:
    source = (
        "{% for m in messages | selectattr('role') %}{{ loop.index ~ '/' ~ loop.length }}"
        "{{ loop.last }}{{ m.content * 2 }} {% endfor %}"
        "{% for x in nothing %}{% else %}{{ 2 ** 10 + 1 }}{% endfor %}{{ ([1] + [2]) | length }}{{ nothing ~ none }}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert ChatTemplate(source, {}).render(messages) == "1/2Falseaa 2/2Truebb 10252None"


class WordTokenizer(NoTokenizer):
    """A token per word, which is its length, and a count of what it was asked for."""

    def __init__(self) -> None:
        self.num_chars = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.num_chars += len(text)
        return [min(len(word), 9) for word in text.split()]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]


class Counted:
    """Encodes prompts through a WordTokenizer; `num_chars` is what the last one was asked for."""

    def __init__(self) -> None:
        self.tokenizer = WordTokenizer()
        self.encoder = Encoder(self.tokenizer)
        facts = EngineFacts(max_model_len=1000, vocab_size=10, num_blocks=100, block_size=16)
        # some token of the vocabulary is so long that the bytes alone prove nothing
        self.model = ServedModel(
            names=("m",), tokenizer=self.tokenizer, template=None, defaults=GenerationDefaults(), facts=facts,
            longest_token_bytes=10**6, created=0, fingerprint="",
        )  # fmt: skip

    async def encode(self, text: str, truncate: int | None = None) -> list[int]:
        self.tokenizer.num_chars = 0
        (prompt,) = await encode_prompts(
            [Prompt(text, None)], self.model, self.encoder, add_special_tokens=True, truncate=truncate
        )
        assert prompt.text == text
        return prompt.ids

    @property
    def num_chars(self) -> int:
        return self.tokenizer.num_chars


@pytest.fixture
def counted() -> Iterator[Counted]:
    made = Counted()
    yield made
    made.encoder.close()


@pytest.mark.rule(22)
async def test_a_text_far_too_long_is_refused_by_its_beginning(counted: Counted) -> None:
    with pytest.raises(RequestError, match="at least") as refused:
        await counted.encode("a " * 2_000_000)
    assert refused.value.code == "context_length_exceeded" and counted.num_chars <= 8000
    assert await counted.encode("a" * 100_000 + " b") == [9, 1]  # long, but few tokens
    assert counted.num_chars <= 250_000
    assert await counted.encode("a " * 900) == [1] * 900
    assert counted.num_chars == 1800  # nothing twice where it may well fit


@pytest.mark.rule(22)
async def test_of_a_text_that_is_truncated_only_the_end_is_encoded(counted: Counted) -> None:
    assert await counted.encode("a " * 2_000_000 + "bb ccc", truncate=5) == [1, 1, 1, 2, 3]
    assert counted.num_chars <= 1200
    assert await counted.encode("b " + "a" * 100_000 + " bb", truncate=3) == [1, 9, 2]  # long, but few tokens
    assert counted.num_chars <= 250_000
    assert await counted.encode("a " * 400 + "bb", truncate=900) == [1] * 400 + [2]
    assert counted.num_chars == 802
