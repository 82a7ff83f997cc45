"""Fields and paths beside the main ones: echo, pauses, prefixes, deadlines in other protocols, what is not served."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from nanoserve.api.app import ROUTES
from nanoserve.config import ApiConfig, EngineConfig, ModelConfig, ObsConfig, ServerConfig
from nanoserve.ipc.messages import AbortCause, AddRequest, FinishReason, RepetitionDetection
from tests.integration.api_ring import Api, loaded_api

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


async def test_chat_echo_begins_with_the_last_message_of_the_assistant(api: Api) -> None:
    body = {"messages": [USER, {"role": "assistant", "content": "Sure"}], "max_tokens": 2, "echo": True}
    for more in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        status, answer = await api.post(CHAT, {**body, **more})
        assert status == 200 and answer["choices"][0]["message"]["content"] == "Sureaa"
        deltas = [event["choices"][0]["delta"] for event in await api.events(CHAT, {**body, **more})]
        assert deltas == [{"role": "assistant", "content": ""}, {"content": "Sure"}, {"content": "aa"}, {}]
    for silent in ({"messages": [USER]}, {"echo": False}):
        answer = (await api.post(CHAT, {**body, **silent}))[1]
        assert answer["choices"][0]["message"]["content"] == "aa"


async def test_usage_comes_unasked_where_the_server_says_so(tmp_path: Path) -> None:
    async with loaded_api(tmp_path, ServerConfig(api=ApiConfig(force_include_usage=True))) as api:
        for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [USER]})):
            events = await api.events(path, {**body, "max_tokens": 2})
            assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 2


async def test_the_fingerprint_stands_in_every_form_and_follows_what_answers_depend_on(tmp_path: Path) -> None:
    seen: list[str] = []
    configs = (
        ServerConfig(),
        ServerConfig(engine=EngineConfig(standby_engine=True)),
        ServerConfig(model=ModelConfig(quantization="int8")),
    )
    for number, config in enumerate(configs):
        async with loaded_api(tmp_path / str(number), config) as api:
            forms = []
            for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [USER]})):
                forms.append((await api.post(path, {**body, "max_tokens": 2}))[1])
                forms += await api.events(path, {**body, "max_tokens": 2})
            (fingerprint,) = {form["system_fingerprint"] for form in forms}
            seen.append(fingerprint)
    assert seen[0] == seen[1] != seen[2] and seen[0].startswith("fp_")


async def test_a_prefix_of_the_proxy_may_be_there_or_not_and_opens_nothing(tmp_path: Path) -> None:
    config = ServerConfig(api=ApiConfig(root_path="/llm/", api_key=("k",), admin_api_key=("admin",)))
    async with loaded_api(tmp_path, config) as api:
        for prefix in ("", "/llm"):
            assert (await api.get(f"{prefix}/health"))[0] == 200
            assert (await api.post(prefix + COMPLETIONS, {"prompt": "x", "max_tokens": 1}))[0] == 401
            status, _ = await api.post(prefix + COMPLETIONS, {"prompt": "x", "max_tokens": 1}, X_Api_Key="k")
            assert status == 200
            assert (await api.post(f"{prefix}/flush_cache", {}, X_Api_Key="k"))[0] == 401
            assert (await api.post(f"{prefix}/flush_cache", {}, X_Api_Key="admin"))[0] == 200
            assert (await api.post(f"{prefix}/v1/messages", {}, X_Api_Key="k"))[1]["type"] == "error"
        assert (await api.get("/llmhealth"))[0] == 401
        async with api.http.get(api.url + "/llm/openapi.json", headers={"X-Api-Key": "k"}) as response:
            assert (await response.json())["servers"] == [{"url": "/llm"}]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_in_the_messages_protocol_is_a_pause(api: Api, stream: bool) -> None:
    api.ring.script = lambda add: api.ring.token(add.request_id, "ab")
    body = {"messages": [USER], "max_tokens": 9, "timeout_s": 0.1, "stream": stream}
    if stream:
        async with api.http.post(api.url + "/v1/messages", json=body) as response:
            text = await response.text()
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        (end,) = [event for event in events if event["type"] == "message_delta"]
        assert end["delta"] == {"stop_reason": "pause_turn", "stop_sequence": None}
    else:
        answer = (await api.post("/v1/messages", body))[1]
        assert (answer["content"][0]["text"], answer["stop_reason"]) == ("ab", "pause_turn")
    await api.ring.until(lambda: api.ring.aborted)
    assert api.ring.aborted[0].cause == AbortCause.DEADLINE


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_in_the_responses_protocol_says_so(api: Api, stream: bool) -> None:
    api.ring.script = lambda add: api.ring.token(add.request_id, "ab")
    body = {"input": "hi", "max_output_tokens": 9, "timeout_s": 0.1, "stream": stream}
    if stream:
        async with api.http.post(api.url + "/v1/responses", json=body) as response:
            text = await response.text()
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        assert events[-1]["type"] == "response.incomplete"
        answer = events[-1]["response"]
    else:
        answer = (await api.post("/v1/responses", body))[1]
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "timeout"})


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages", {"messages": [USER], "max_tokens": 9}), ("/v1/responses", {"input": "hi"})],
)
async def test_a_queue_deadline_holds_in_every_protocol(api: Api, path: str, body: dict[str, object]) -> None:
    api.ring.script = lambda add: None
    status, answer = await api.post(path, {**body, "queue_timeout_s": 0.1})
    assert (status, answer["error"]["error_code"]) == (503, "queue_timeout")


async def test_a_pause_reaches_the_engine(api: Api) -> None:
    for path, paused in (("/pause_generation", True), ("/continue_generation", False)):
        assert (await api.post(path, {}))[1] == {"status": "ok", "paused": paused}
        await api.ring.until(lambda paused=paused: api.ring.paused is paused)
        async with asyncio.timeout(5):
            while (await api.get("/ready"))[1]["paused"] is not paused:
                await asyncio.sleep(0.01)
        assert (await api.get("/ready"))[0] == 200  # requests are taken and wait: no reason to send them elsewhere
        assert (await api.get("/server_info"))[1]["status"]["paused"] is paused
        assert (await api.get("/v1/loads"))[1]["paused"] is paused
        assert f"nanoserve_paused {float(paused)}\n" in (await api.get("/metrics"))[1]
    assert (await api.post("/pause_generation", {"mode": "in_place"}))[0] == 200
    assert (await api.post("/pause_generation", {"mode": "abort"}))[0] == 400


@pytest.mark.rule(17)
async def test_paths_for_other_kinds_of_models_say_what_this_server_is(api: Api) -> None:
    status, answer = await api.post("/v1/embeddings", {"input": "x"})
    assert (status, answer["error"]["code"]) == (404, 404) and "generates text" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [97]}), ("/abort_request", {"rid": "x"}),
     (CHAT + "/render", {"messages": [USER]}), ("/v1/messages/count_tokens", {"messages": [USER]}),
     ("/pause_generation", {})],
)  # fmt: skip
async def test_unknown_fields_are_named_on_every_path(api: Api, path: str, body: dict[str, object]) -> None:
    async with api.http.post(api.url + path, json={**body, "frobnicate": 1}) as response:
        assert response.status == 200 and "frobnicate" in response.headers["X-Nanoserve-Warnings"]


async def test_unknown_fields_are_refused_on_every_path_where_the_server_is_strict(tmp_path: Path) -> None:
    async with loaded_api(tmp_path, ServerConfig(api=ApiConfig(strict_params=True))) as api:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/abort_request", {"rid": "x"})):
            status, answer = await api.post(path, {**body, "frobnicate": 1})
            assert (status, answer["error"]["param"]) == (400, "frobnicate")


@pytest.mark.parametrize("field", ["token_ids_logprob", "image_data", "input_embeds", "custom_logit_processor"])
async def test_native_fields_that_are_not_supported_are_refused(api: Api, field: str) -> None:
    status, answer = await api.post("/generate", {"text": "x", field: [1]})
    assert (status, answer["error"]["param"]) == (400, field)


async def test_the_description_names_every_answer(api: Api) -> None:
    document = (await api.get("/openapi.json"))[1]
    answers = set(document["paths"][COMPLETIONS]["post"]["responses"])
    assert answers >= {"200", "400", "401", "404", "408", "410", "413", "415", "417", "429", "431", "500", "503"}


@pytest.mark.parametrize(
    ("path", "least", "fields"),
    [
        (COMPLETIONS, {"prompt": "x"}, 15),
        (CHAT, {"messages": [USER]}, 16),
        ("/v1/responses", {"input": "hi"}, 6),
        ("/v1/messages", {"messages": [USER], "max_tokens": 1}, 6),
    ],
)
async def test_the_description_tells_the_bounds_that_hold(
    api: Api, path: str, least: dict[str, object], fields: int
) -> None:
    document = (await api.get("/openapi.json"))[1]
    name = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    properties = document["components"]["schemas"][name.rpartition("/")[2]]["properties"]
    numbers = {name: schema["anyOf"][0] for name, schema in properties.items() if "maximum" in str(schema)}
    assert {"temperature", "top_p", "top_k", "timeout_s"} <= numbers.keys() and len(numbers) >= fields
    if path == CHAT:
        assert numbers["temperature"] == {"type": "number", "minimum": 0.0, "maximum": 2.0}
        assert numbers["n"] == {"type": "integer", "minimum": 1, "maximum": 128}
        assert numbers["top_p"] == {"type": "number", "exclusiveMinimum": 0.0, "maximum": 1.0}
    for field, schema in numbers.items():
        step = 1 if schema["type"] == "integer" else 1e-4
        low = schema["minimum"] - step if "minimum" in schema else schema["exclusiveMinimum"]
        for value in (low, schema["maximum"] + step):
            status, answer = await api.post(path, {**least, field: value})
            assert status == 400 and "must be" in answer["error"]["message"], (field, value, answer)
        if step < 1:  # a whole number at its bound may be too much of something else
            lowest = schema.get("minimum", schema.get("exclusiveMinimum", 0) + step)
            for value in (lowest, schema["maximum"]):
                status, answer = await api.post(path, {**least, "timeout_s": 9, field: value})
                assert status != 400, (field, value, answer)


async def test_a_bias_beyond_100_counts_as_100(api: Api) -> None:
    await api.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1, "logit_bias": {"5": 1e6, "6": -101, "7": 2.5}})
    assert api.ring.added[-1].sampling.logit_bias == {5: 100.0, 6: -100.0, 7: 2.5}


def _documented_routes() -> set[tuple[str, str]]:
    """Method and path of every row of the first column of the table in docs/http-api.md."""
    text = (Path(__file__).parents[2] / "docs/http-api.md").read_text(encoding="utf-8")
    table = text.partition("## Paths\n")[2].partition("\n## ")[0]
    routes = set()
    for row in table.splitlines():
        method, path, first = "", "", row.split(" | ")[0]
        for word in re.findall(r"[A-Z]{3,}|/[\w./{}]+", first):
            if word.isupper():
                method, other = word, method
                if other:  # "`POST /generate` (or `PUT`)"
                    routes.add((word, path))
            else:
                path = word
                routes.add((method, path))
    return routes


async def test_router_description_and_documentation_name_the_same_routes(api: Api) -> None:
    served = {(method, path.replace("{name:.+}", "{id}")) for method, path, _ in ROUTES}
    document = (await api.get("/openapi.json"))[1]
    described = {
        (method.upper(), path) for path, item in document["paths"].items() for method in item if method != "parameters"
    }
    assert described == served
    assert _documented_routes() == served


async def test_a_full_queue_does_not_make_the_ring_look_broken(api: Api) -> None:
    api.process.context.admission.num_held = 10**6
    assert (await api.post(COMPLETIONS, {"prompt": "x"}))[0] == 503
    async with asyncio.timeout(5):
        assert (await api.get("/health_generate"))[0] == 200


async def test_a_request_is_logged_from_the_moment_it_is_asked_for(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "nanoserve.api.request_log"]

    body = {"prompt": "secret", "max_tokens": 2}
    await api.post(COMPLETIONS, body)
    assert lines() == []
    status, answer = await api.post("/configure_logging", {"log_requests": True})
    assert (status, answer) == (200, {"status": "ok", "log_requests": True, "log_requests_level": 0})
    await api.post(COMPLETIONS, body, X_Request_Id="mine")
    await api.events(CHAT, {"messages": [USER], "max_tokens": 3})
    first, second = lines()
    assert first.startswith(f"request mine: {COMPLETIONS}; prompt 6, cached 0, output 2 tokens; ")
    assert first.endswith("; length") and f"{CHAT}; " in second and "output 3 tokens" in second
    assert (await api.post("/configure_logging", {"log_requests_level": 1}))[1]["log_requests"] is True
    await api.post(COMPLETIONS, {**body, "temperature": 0.25, "bad_words": ["secret"]})
    assert "temperature=0.25" in lines()[-1] and "bad_words=(" in lines()[-1]
    await api.post("/configure_logging", {"log_requests": False})
    await api.post(COMPLETIONS, body)
    assert len(lines()) == 3 and not any("secret" in line for line in lines())


async def test_requests_are_logged_from_the_start_where_the_server_was_told_to(tmp_path: Path) -> None:
    config = ServerConfig(obs=ObsConfig(log_requests=True, log_requests_level="1"))
    async with loaded_api(tmp_path, config) as api:
        log = api.process.context.request_log
        assert (log.is_on, log.level) == (True, 1)


@pytest.mark.parametrize(
    "body",
    [{"frobnicate": 1}, {"dump_requests_folder": "/x"}, {"log_requests": 1}, {"log_requests_level": 2},
     {"log_level": "loud"}],
)  # fmt: skip
async def test_what_cannot_be_logged_is_refused_and_changes_nothing(api: Api, body: dict[str, object]) -> None:
    assert (await api.post("/configure_logging", {"log_requests": True, **body}))[0] == 400
    assert not api.process.context.request_log.is_on


@pytest.mark.parametrize("kind", [None, "application/octet-stream", "application/x-www-form-urlencoded"])
async def test_no_body_is_one_without_fields_where_none_is_needed(api: Api, kind: str | None) -> None:
    """curl -X POST, curl -d '' and aiohttp's post() send one of these types, or none."""
    skipped = [] if kind else ["Content-Type"]
    for path, status in (
        ("/pause_generation", 200), ("/continue_generation", 200), ("/configure_logging", 200), ("/flush_cache", 200),
        ("/abort_request", 400), (COMPLETIONS, 400),
    ):  # fmt: skip
        headers = {"Content-Type": kind} if kind else {}
        async with api.http.post(api.url + path, headers=headers, skip_auto_headers=skipped) as response:
            answer = await response.json()
            assert response.status == status, (path, answer)
            if path == "/abort_request":
                assert answer["error"]["param"] == "rid"


async def test_a_profile_is_begun_once_and_says_where_its_file_will_be(api: Api, tmp_path: Path) -> None:
    ring = api.ring
    api.process.context.log_dir = tmp_path
    status, answer = await api.post("/start_profile", {"num_steps": 5, "activities": ["CPU"]})
    (asked,) = ring.profiles
    assert status == 200 and answer == {"status": "ok", "num_steps": 5, "file": asked.file}
    assert asked.num_steps == 5 and Path(asked.file).parent == tmp_path
    assert (await api.post("/start_profile", {"num_steps": 5}))[0] == 409 and len(ring.profiles) == 1
    ring.stats(profile_steps_left=0)
    while api.process.context.metrics.engine_stats.profile_steps_left:
        await asyncio.sleep(0.01)
    # another api process is quicker: the engine has begun its profile when our word comes
    ring.start_profile = lambda message: ring.stats(profile=message.number + 1, profile_steps_left=9)
    assert (await api.post("/start_profile", {"num_steps": 5}))[0] == 409


async def test_a_profile_runs_until_it_is_stopped(api: Api) -> None:
    """As clients of other servers do: both without a body, or with one that is meant for something else."""
    stopped = {"status": "ok", "file": None}
    assert await api.post("/stop_profile", b"") == (200, stopped)
    for body in (b"", {"model": "tiny", "prompt": "x", "stream": True}):
        status, answer = await api.post("/start_profile", body)
        assert (status, answer["num_steps"]) == (200, 10_000)
        assert api.ring.profiles[-1].num_steps == 10_000
        assert await api.post("/stop_profile", body) == (200, stopped | {"file": answer["file"]})
        assert await api.post("/stop_profile", body) == (200, stopped)


@pytest.mark.parametrize("body", [{"num_steps": 0}, {"num_steps": 10_001}, {"num_steps": 5, "output_dir": "/x"}])
async def test_a_profile_has_a_bounded_number_of_steps(api: Api, body: dict[str, object]) -> None:
    status, answer = await api.post("/start_profile", body)
    assert status == 400 and answer["error"]["param"] in ("num_steps", "output_dir") and not api.ring.profiles


def repeat(api: Api) -> None:
    """The engine ends every request as one that repeats itself."""

    def script(add: AddRequest) -> None:
        api.ring.token(add.request_id, "abab")
        api.ring.finish(add.request_id, FinishReason.REPETITION)

    api.ring.script = script


async def test_a_repetition_ends_an_answer_with_its_own_reason(api: Api) -> None:
    repeat(api)
    wanted = {"max_pattern_size": 4, "min_count": 2}
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [USER]})):
        body = {**body, "max_tokens": 9, "repetition_detection": wanted}
        (choice,) = (await api.post(path, body))[1]["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", None)
        assert (choice.get("text") or choice["message"]["content"]) == "abab"
        last = (await api.events(path, body))[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("repetition", None)
        assert api.ring.added[-1].sampling.repetition_detection == RepetitionDetection(4, 1, 2)
    body = {"text": "x", "sampling_params": {"max_new_tokens": 9, "repetition_detection": wanted}}
    status, answer = await api.post("/generate", body)
    assert status == 200 and answer["meta_info"]["finish_reason"]["type"] == "repetition" and answer["text"] == "abab"


async def test_repetition_detection_is_off_where_it_looks_for_nothing(api: Api) -> None:
    for wanted in (None, {}, {"max_pattern_size": 0, "min_count": 0}):
        body = {"prompt": "x", "max_tokens": 1, "repetition_detection": wanted}
        assert (await api.post(COMPLETIONS, body))[0] == 200
        assert api.ring.added[-1].sampling.repetition_detection is None


@pytest.mark.parametrize(
    ("wanted", "field"),
    [({"max_pattern_size": 4}, "min_count"), ({"max_pattern_size": 4, "min_count": 1}, "min_count"),
     ({"max_pattern_size": 257, "min_count": 2}, "max_pattern_size"),
     ({"max_pattern_size": -1, "min_count": 2}, "max_pattern_size"),
     ({"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2}, "min_pattern_size")],
)  # fmt: skip
async def test_what_repetition_detection_cannot_mean(api: Api, wanted: dict[str, int], field: str) -> None:
    status, answer = await api.post(COMPLETIONS, {"prompt": "x", "repetition_detection": wanted})
    assert (status, answer["error"]["param"]) == (400, f"repetition_detection.{field}")
