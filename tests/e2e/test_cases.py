"""Small inputs with their right answers, on SmolLM2-135M: each unary and streamed, both alike.

`force` lets the model emit one token only. Ids: " yes" 9805, " two" 827, " day" 1194, " ;" 8544, "ab" 369, four spaces
289, two tabs 1656, bytes F0 9F = 10813, 94 = 238, A5 = 115, E2 = 173, "<file_sep>" 5; 🔥 = [10813, 238, 115].
"""

from __future__ import annotations

import json
import math
import re
import threading
from typing import Any

import pytest

from tests.e2e.harness import Server, wait_until
from tests.e2e.openai_stream import CHAT, COMPLETIONS, Answer, ask, ask_streamed, ask_unary
from tests.forced import AB, DAY, E2, FILE_SEP, FIRE, SEMICOLON, SPACES, TABS, TWO, YES, force
from tests.sse_grammar import check_error

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def server(smollm2_server: Server) -> Any:
    """After every case the server is healthy and serves."""
    yield smollm2_server
    assert smollm2_server.get("/health")[0] == 200
    assert smollm2_server.post(COMPLETIONS, {"prompt": "Go", "max_tokens": 1})[0] == 200


def go(server: Server, max_tokens: int, *ids: int, prompt: Any = "Go", **fields: Any) -> Answer:
    return ask(server, {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **force(*ids), **fields})


@pytest.mark.case(1, 2, 3, 4, 11)
@pytest.mark.rule(45, 51)
@pytest.mark.parametrize(
    ("token_id", "max_tokens", "text"),
    [
        (YES, 4, " yes yes yes yes"),
        (SEMICOLON, 6, " ; ; ; ; ; ;"),
        (SPACES, 5, " " * 20),
        (TABS, 3, "\t" * 6),
        (FILE_SEP, 30, ""),
    ],
)
def test_1_to_4_and_11_spaces_and_specials(server: Server, token_id: int, max_tokens: int, text: str) -> None:
    answer = go(server, max_tokens, token_id)
    assert (answer.text, answer.reason, answer.usage["completion_tokens"]) == (text, "length", max_tokens)


@pytest.mark.case(5, 6)
def test_5_and_6_fire(server: Server) -> None:
    texts = [go(server, n, *FIRE, prompt="🔥" * 12) for n in (18, 19, 20)]
    assert [answer.usage["completion_tokens"] for answer in texts] == [18, 19, 20]
    whole = texts[0].text
    assert "🔥" in whole
    for answer in texts[1:]:
        assert answer.text.rstrip("�").startswith(whole.rstrip("�")) and answer.text.count("�") <= 1


@pytest.mark.case(7)
@pytest.mark.rule(47)
def test_7_held_bytes_are_flushed_and_come_early(server: Server) -> None:
    answer = go(server, 25, FIRE[1])
    assert answer.text == "�" * 25 and answer.num_content_events > 3


@pytest.mark.case(8)
def test_8_long_garbage(server: Server, sim_server: Server) -> None:
    """That its cost per token does not grow is the detokenizer's own test; here it is only right."""
    assert go(server, 75, E2).text == "�" * 75
    assert go(sim_server, 300, E2).text == "�" * 300


@pytest.mark.case(9, 10)
@pytest.mark.rule(48)
def test_9_and_10_the_prompt_is_no_part_of_the_output(server: Server) -> None:
    text = go(server, 3, FIRE[1], prompt=[14229, DAY, FIRE[0]]).text
    assert "Good" not in text and "day" not in text and len(text) <= 4
    text = go(server, 1, FIRE[2], prompt=[14229, DAY, FIRE[0], FIRE[1]]).text
    assert text in ("🔥", "�")


@pytest.mark.case(12, 13, 14)
@pytest.mark.parametrize(
    ("prompt", "n"), [("தமிழ் " * 10, 30), ("🏳️‍🌈" * 10, 27), ("שלום, " * 10, 24)], ids=["tamil", "flag", "hebrew"]
)
def test_12_to_14_scripts(server: Server, sim_server: Server, prompt: str, n: int) -> None:
    ids = server.post("/tokenize", {"prompt": prompt})[1]["tokens"]
    text = go(server, n, *set(ids), prompt=prompt).text
    assert "�" not in text.rstrip("�")
    text = go(sim_server, n, prompt=prompt).text  # says the prompt again
    assert len(text) > 8 and prompt.startswith(text.rstrip("�"))


@pytest.mark.case(15, 16, 17, 18, 19, 20)
@pytest.mark.rule(54, 55, 56, 60)
@pytest.mark.parametrize(
    ("token_id", "n", "stop", "text", "reason"),
    [
        (YES, 12, ["es ye"], " y", "stop"),
        (YES, 12, ["s"], " ye", "stop"),
        (YES, 12, [" yes yes yes yes no"], " yes" * 12, "length"),
        (TWO, 40, ["Q" * 120], " two" * 40, "length"),
        (AB, 9, ["bab", "ba"], "a", "stop"),
        (AB, 9, ["abab", "b"], "a", "stop"),
    ],
)
def test_15_to_20_stop_strings(server: Server, token_id: int, n: int, stop: list[str], text: str, reason: str) -> None:
    answer = go(server, n, token_id, stop=stop)
    assert (answer.text, answer.reason) == (text, reason)
    if reason == "stop":
        assert answer.stop_reasons[0] in stop


@pytest.mark.case(18)
@pytest.mark.rule(56)
def test_18_a_long_stop_string_delays_nothing(server: Server) -> None:
    body = {"prompt": "Go", "max_tokens": 40, "temperature": 0, "stop": ["Q" * 120], **force(TWO)}
    # Drafts bring up to five tokens at once; held back for 120 characters, the last ten would come in two or three.
    assert ask_streamed(server, body).num_content_events >= 40 // 5


@pytest.mark.case(21)
@pytest.mark.rule(54)
def test_21_the_prompt_is_not_searched(server: Server) -> None:
    answer = go(server, 1, YES, prompt="so yes ye", echo=True, stop=["yes y"])
    assert (answer.text, answer.reason) == ("so yes ye yes", "length")


@pytest.mark.case(22)
@pytest.mark.rule(57)
def test_22_an_unfinished_character_is_no_match(server: Server) -> None:
    plain = go(server, 18, *FIRE, prompt="🔥" * 12)
    assert "�" not in plain.text
    stopped = go(server, 18, *FIRE, prompt="🔥" * 12, stop=["�"])
    assert (stopped.text, stopped.reason) == (plain.text, "length")


REFUSED = [
    # 23
    {"stop": [""]},
    # 27
    {"prompt": [3, "x"]}, {"prompt": [[]]}, {"prompt": [True]}, {"prompt": None},
    # 28
    {"prompt": [49152]}, {"prompt": [-7]}, {"prompt": [2**33]}, {"prompt": [2**66]},
    # 29
    {"logit_bias": {"49152": 1}}, {"logit_bias": {"x": 1}}, {"logit_bias": {"-3": 1}}, {"logit_bias": {"7": "y"}},
    # 30
    {"seed": 2**63}, {"seed": -(2**63) - 1}, {"seed": "a"},
    # 31
    {"temperature": math.nan}, {"top_p": math.inf}, {"temperature": 1e400},
    # 35
    {"n": 0}, {"n": -3}, {"n": 10**9},
]  # fmt: skip


@pytest.mark.case(23, 27, 28, 29, 30, 31, 35)
@pytest.mark.rule(11, 14)
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
@pytest.mark.parametrize("fields", REFUSED, ids=str)
def test_23_to_35_refusals(server: Server, fields: dict[str, Any], stream: bool) -> None:
    status, body = server.post(COMPLETIONS, {"prompt": "Go", "max_tokens": 4, "stream": stream, **fields})
    assert status == 400
    check_error(body)


@pytest.mark.case(30)
def test_30_the_largest_seed(server: Server) -> None:
    ask(server, {"prompt": "Go", "max_tokens": 4, "seed": 2**63 - 1})


@pytest.mark.case(40)
@pytest.mark.rule(9, 14)
@pytest.mark.parametrize("data", [b'{"prompt":"\\ud800"}', b"[1]", b'{"prompt":"\xfe"}', b"\xfe", b""])
def test_40_bodies_that_are_none(server: Server, data: bytes) -> None:
    connection = server.connect()
    try:
        connection.request("POST", COMPLETIONS, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert 400 <= response.status < 500
        check_error(json.loads(response.read()))
    finally:
        connection.close()


@pytest.mark.case(24, 25)
@pytest.mark.rule(24, 69)
def test_24_and_25_choices(server: Server) -> None:
    answer = ask(server, {"prompt": "Go", "n": 2, "temperature": 1, "max_tokens": 3, **force(DAY)})
    assert answer.texts == [" day day day"] * 2 and answer.usage["completion_tokens"] == 6
    body = {"prompt": ["a b", "c d e"], "n": 2, "temperature": 1, "echo": True, "max_tokens": 1, **force(DAY)}
    assert ask(server, body).texts == ["a b day", "a b day", "c d e day", "c d e day"]


@pytest.mark.case(26)
@pytest.mark.rule(24)
def test_26_four_shapes_mean_the_same(server: Server) -> None:
    shapes: list[Any] = ["Good day", ["Good day"], [14229, 1194], [[14229, 1194]]]
    answers = [ask(server, {"prompt": prompt, "max_tokens": 4, "temperature": 0}) for prompt in shapes]
    assert len({answer.text for answer in answers}) == 1
    assert all(answer.usage["prompt_tokens"] == 2 for answer in answers)


@pytest.mark.case(32)
@pytest.mark.rule(36)
def test_32_nearly_zero_temperature_is_greedy(server: Server) -> None:
    body = {"prompt": "Two plus two is", "max_tokens": 8}
    assert len({ask(server, {**body, "temperature": t}).text for t in (1e-8, 1e-5, 0)}) == 1


@pytest.mark.case(33, 34)
@pytest.mark.rule(26)
def test_33_and_34_context(server: Server) -> None:
    limit = server.get("/v1/models")[1]["data"][0]["max_model_len"]
    for stream in (False, True):
        status, body = server.post(COMPLETIONS, {"prompt": [10] * limit, "max_tokens": 1, "stream": stream})
        assert status == 400 and str(limit) in body["error"]["message"]
    answer = ask(server, {"prompt": [10] * (limit - 1), "max_tokens": 1, "temperature": 0})
    assert answer.usage["completion_tokens"] == 1


@pytest.mark.case(36, 37)
@pytest.mark.rule(62, 67)
def test_36_and_37_chat(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0, **force(TWO)}
    answer = ask(server, body, CHAT)
    assert (answer.text, answer.reason) == (" two", "length")
    body = {
        "messages": [{"role": "user", "content": "🔥" * 20}],
        "max_tokens": 9,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 1,
        **force(*FIRE),
    }
    answer = ask(server, body, CHAT)
    entries = answer.logprobs[0]["content"]
    assert len(entries) == 9
    raw = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert raw.decode(errors="replace").rstrip("�") == answer.text.rstrip("�")


@pytest.mark.case(38)
@pytest.mark.rule(63)
def test_38_echo_and_logprobs(server: Server) -> None:
    answer = go(server, 2, DAY, prompt="Good day", echo=True, logprobs=1)
    shown = answer.logprobs[0]
    assert answer.text == "Good day day day" == "".join(shown["tokens"])
    assert shown["text_offset"] == [0, 4, 8, 12] and shown["token_logprobs"][0] is None


@pytest.mark.rule(28, 64)
def test_echo_alone_scores_the_prompt(server: Server) -> None:
    answer = ask(server, {"prompt": "Good day to you", "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0})
    assert answer.text == "Good day to you" and answer.usage["completion_tokens"] == 0
    assert len(answer.logprobs[0]["tokens"]) == 4


@pytest.mark.case(39)
def test_39_hang_up_frees_the_engine(server: Server) -> None:
    def value(name: str) -> float:
        lines = server.get("/metrics")[1].splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"nanoserve_{name}[ {{]", line))

    before = value("generation_tokens_total")
    stream = server.stream(COMPLETIONS, {"prompt": "Go", "max_tokens": 1500, **force(YES)})
    for _ in range(3):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    wait_until(lambda: value("num_requests_running") == 0, 10.0, "the engine still runs the request")
    assert value("generation_tokens_total") - before < 500


@pytest.mark.case(41)
def test_41_neighbours(server: Server) -> None:
    results: dict[int, Any] = {}
    tokens = [(YES, " yes"), (TWO, " two"), (DAY, " day"), (SEMICOLON, " ;")] * 3

    def work(number: int, token_id: int) -> None:
        body = {"prompt": "Go", "max_tokens": 20, "temperature": 0, **force(token_id)}
        results[number] = (ask_streamed if number % 2 else ask_unary)(server, body).text

    def spoil(number: int) -> None:
        results[number] = server.post(COMPLETIONS, {"prompt": [10**6], "max_tokens": 5})[0]

    threads = [threading.Thread(target=work, args=(i, token_id)) for i, (token_id, _) in enumerate(tokens)]
    threads += [threading.Thread(target=spoil, args=(100 + i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(12)] == [text * 20 for _, text in tokens]
    assert [results[100 + i] for i in range(3)] == [400] * 3
