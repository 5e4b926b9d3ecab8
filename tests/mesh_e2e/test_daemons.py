"""Real daemons: they find each other, answer together, and say clearly what is wrong."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mesh.cli.local_node import LocalNode
from mesh.health.series import PRESENT, SERIES
from mesh.models.builtin import checkpoint_dir
from mesh.paths import StatePaths
from tests.checkpoints import make_checkpoint
from tests.mesh_e2e.conftest import StartNode
from tests.mesh_e2e.spread import hugging_face
from tests.warm.daemons import command

DOCS = Path(__file__).parents[2] / "docs"
QUESTION = [{"role": "user", "content": "What is hearthnet?"}]


@pytest.fixture(scope="module")
def home(start_node: StartNode) -> dict[str, LocalNode]:
    """Three nodes that hold the built-in model with overlap, and an asker without layers."""
    nodes = {
        "attic": start_node("attic", "--layers", "0-4"),
        "kitchen": start_node("kitchen", "--layers", "3-7"),
        "study": start_node("study", "--layers", "4-7"),
        "sofa": start_node("sofa", "--layers", "none"),
    }
    for node in nodes.values():
        node.wait_ready()
    return nodes


@pytest.fixture
def sofa(home: dict[str, LocalNode]) -> LocalNode:
    return home["sofa"]


def ask(node: LocalNode, **body: Any) -> dict[str, Any]:
    response = node.post(
        "/v1/chat/completions",
        {"model": "builtin", "messages": QUESTION, "temperature": 0, **body},
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(node: LocalNode, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = node.post(path, body)
    assert response.status_code >= 400
    error: dict[str, Any] = response.json()["error"]
    assert error["message"]
    assert error["fix"]
    return {**error, "status": response.status_code}


def hearthnet(*arguments: str, node: LocalNode | None = None, stdin: str = "") -> Any:
    flags = ["--state-dir", str(node.state_dir)] if node else []
    return command(*arguments, *flags, stdin=stdin)


@pytest.mark.slow
class TestAnswering:
    def test_everybody_found_everybody(self, home: dict[str, LocalNode]) -> None:
        for name, node in home.items():
            peers = {p["name"] for p in node.get("/mesh/v1/peers")["peers"] if p["state"] == "up"}
            assert peers == set(home) - {name}

    def test_everybody_reaches_every_port_of_everybody_both_ways(self, sofa: LocalNode) -> None:
        anybody = httpx.post(f"{sofa.url}/mesh/v1/reach", json={}, trust_env=False, timeout=30)
        assert anybody.status_code == 401, "it has every peer connect"
        rows = {row["name"]: row for row in sofa.post("/mesh/v1/reach", {}).json()["peers"]}
        assert rows.keys() == {"attic", "kitchen", "study"}
        for row in rows.values():
            there = [port["what"] for port in row["out"]]
            assert there[:2] == ["nodes", "layers"]
            assert not [port for port in [*row["out"], *row["back"]] if port["why"]]
            assert row["back"][0]["what"] == "nodes"
            assert abs(row["ahead_s"]) < 5

    def test_the_doctor_finds_nothing_wrong_with_a_house_that_answers(
        self, sofa: LocalNode
    ) -> None:
        told = hearthnet("doctor", "--host", sofa.url, node=sofa)
        assert told.returncode == 0, told.stdout
        for name in ("attic", "kitchen", "study"):
            assert f"ok      peers: {name}: hearthnet " in told.stdout
        assert "ok      clocks: within 5 s of " in told.stdout
        assert "ok      ready: builtin can be asked\n" in told.stdout

    def test_it_is_said_what_nobody_can_check(self, sofa: LocalNode) -> None:
        (route,) = sofa.get("/mesh/v1/privacy")["routes"]
        checked = [(hop["layers"], hop["is_checkable"]) for hop in route["hops"]]
        assert checked == [("0-4", False), ("5-7", True)]
        words = hearthnet("doctor", "privacy", node=sofa).stdout
        assert "nobody but attic holds all of these: what it answers is checked only if" in words

    def test_an_answer_comes_over_two_nodes(self, sofa: LocalNode) -> None:
        answer = ask(sofa)
        assert "mesh" in answer["choices"][0]["message"]["content"]
        facts = answer["hearthnet"]
        assert [hop["layers"] for hop in facts["route"]] == ["0-4", "5-7"]
        assert facts["failovers"] == 0
        assert not facts["fallback"]
        assert facts["timings"]["first_token_ms"] > 0
        assert len(facts["timings"]["hops"]) == 2

    def test_token_ids_equal_hugging_face_with_fp16_on_the_wire(self, sofa: LocalNode) -> None:
        prompt = [40 + i for i in range(50)]
        response = sofa.post(
            "/v1/completions",
            {"model": "builtin", "prompt": prompt, "temperature": 0, "max_tokens": 48,
             "ignore_eos": True},
        )  # fmt: skip
        ids, _ = hugging_face(checkpoint_dir(), prompt, 48)
        assert response.json()["hearthnet"]["token_ids"] == ids
        wide = sofa.post(
            "/v1/completions",
            {"model": "builtin", "prompt": prompt, "temperature": 0, "max_tokens": 48,
             "ignore_eos": True, "wire_dtype": "fp32"},
        )  # fmt: skip
        assert wide.json()["hearthnet"]["token_ids"] == ids

    def test_prompts_are_scored_as_evaluation_harnesses_ask(self, sofa: LocalNode) -> None:
        """The body of lm_eval's `local-completions`."""
        prompts = [[40 + i for i in range(50)], [300 - 7 * i for i in range(9)]]
        body = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        answer = httpx.post(
            f"{sofa.url}/v1/completions", json={"model": "builtin", "prompt": prompts, **body},
            headers={"X-Request-Id": "eval-17"}, trust_env=False, timeout=60,
        )  # fmt: skip
        assert answer.headers["x-request-id"] == "eval-17"
        log = StatePaths(sofa.state_dir).daemon_log.read_text().splitlines()
        (line,) = [each for each in log if each.endswith("[request eval-17]")]
        assert "POST /v1/completions: 200 in " in line
        choices = answer.json()["choices"]
        for prompt, choice in zip(prompts, choices, strict=True):
            values = choice["logprobs"]["token_logprobs"]
            assert len(values) == len(prompt) + 1
            _, logits = hugging_face(checkpoint_dir(), prompt[:1], 1)
            first = logits[0].log_softmax(-1)
            assert abs(values[1] - float(first[prompt[1]])) < 0.1  # in 16 bit, over two nodes
            assert max(choice["logprobs"]["top_logprobs"][1].values()) >= values[1]
        assert answer.json()["usage"]["prompt_tokens"] == 59

    def test_what_the_text_has_not_moves_no_offset(self, sofa: LocalNode) -> None:
        body = {
            "model": "builtin", "prompt": "The attic", "max_tokens": 3, "logprobs": 0,
            "ignore_eos": True, "logit_bias": {"0": 100}, "temperature": 0,
        }  # fmt: skip
        (choice,) = sofa.post("/v1/completions", body).json()["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == ("", [0, 0, 0])

    def test_the_openai_client_streams(self, sofa: LocalNode) -> None:
        client = openai.OpenAI(
            base_url=f"{sofa.url}/v1", api_key="unused",
            http_client=httpx.Client(trust_env=False),
        )  # fmt: skip
        with client:
            chunks = list(
                client.chat.completions.create(
                    model="builtin", messages=QUESTION, temperature=0, stream=True,  # type: ignore[arg-type]
                    stream_options={"include_usage": True},
                )
            )  # fmt: skip
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == ask(sofa)["choices"][0]["message"]["content"]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens > 10

    def test_the_openai_client_streams_responses(self, sofa: LocalNode) -> None:
        client = openai.OpenAI(
            base_url=f"{sofa.url}/v1", api_key="unused",
            http_client=httpx.Client(trust_env=False),
        )  # fmt: skip
        (question,) = QUESTION
        asked = {"model": "builtin", "input": question["content"], "temperature": 0}
        with client, client.responses.stream(**asked) as stream:  # type: ignore[arg-type]
            text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
            answer = stream.get_final_response()
        assert text == answer.output_text == ask(sofa)["choices"][0]["message"]["content"]
        assert answer.usage is not None
        assert answer.usage.output_tokens > 10

    def test_an_answer_follows_a_schema(self, sofa: LocalNode) -> None:
        schema = {
            "type": "object", "properties": {"place": {"enum": ["attic", "hearth"]}},
            "required": ["place"], "additionalProperties": False,
        }  # fmt: skip
        wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
        (choice,) = ask(sofa, response_format=wanted)["choices"]
        assert json.loads(choice["message"]["content"])["place"] in ("attic", "hearth")
        assert choice["finish_reason"] == "stop"

    def test_a_model_without_tools_says_its_name(self, sofa: LocalNode) -> None:
        tool = {"type": "function", "function": {"name": "look"}}
        body = {"model": "builtin", "messages": QUESTION, "tools": [tool]}
        error = refused(sofa, "/v1/chat/completions", body)
        assert (error["status"], error["param"]) == (400, "tools")
        assert error["message"].startswith("builtin knows no tools")

    def test_a_second_turn_prefills_only_what_is_new(self, sofa: LocalNode) -> None:
        first = ask(sofa)
        messages = [
            *QUESTION,
            {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
            {"role": "user", "content": "Who drives a request?"},
        ]
        second = ask(sofa, messages=messages)
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["total_tokens"] - 1

    def test_conversations_that_begin_alike_compute_the_beginning_once(
        self, sofa: LocalNode
    ) -> None:
        cached = 0
        for place in ("home", "work", "sea"):
            rules = {"role": "system", "content": f"You help at {place}. " * 30}
            first = ask(sofa, messages=[rules, {"role": "user", "content": "Hi! " * 60}])
            second = ask(sofa, messages=[rules, *QUESTION])
            cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
            if cached:  # of two that have the layers, one may be suspected for a moment
                break
        assert 64 < cached < first["usage"]["prompt_tokens"] // 2

    def test_the_same_seed_gives_the_same_text(self, sofa: LocalNode) -> None:
        texts = {
            ask(sofa, temperature=1.5, seed=11, max_tokens=30)["choices"][0]["message"]["content"]
            for _ in range(2)
        }
        assert len(texts) == 1

    def test_stop_strings_and_limits(self, sofa: LocalNode) -> None:
        whole = ask(sofa)["choices"][0]["message"]["content"]
        cut = ask(sofa, stop=["home"])
        assert cut["choices"][0]["message"]["content"] == whole[: whole.index("home")]
        assert cut["choices"][0]["finish_reason"] == "stop"
        short = ask(sofa, max_tokens=5)
        assert short["choices"][0]["finish_reason"] == "length"
        assert short["usage"]["completion_tokens"] == 5

    def test_a_client_that_leaves_frees_every_hop(self, home: dict[str, LocalNode]) -> None:
        sofa = home["sofa"]
        body = {"model": "builtin", "prompt": "Once", "max_tokens": 3000, "ignore_eos": True,
                "temperature": 0, "stream": True}  # fmt: skip
        url = f"{sofa.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as response:
            lines = response.iter_lines()
            for _ in range(6):
                next(lines)
            assert sofa.get("/mesh/v1/status")["generations"]
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            streams = sum(
                shard["active_streams"]
                for name in ("attic", "kitchen", "study")
                for shard in home[name].get("/mesh/v1/status")["shards"]
            )
            if streams == 0 and not sofa.get("/mesh/v1/status")["generations"]:
                return
            time.sleep(0.1)
        pytest.fail("a hop still holds the session")

    def test_the_verbs(self, sofa: LocalNode) -> None:
        run = hearthnet("run", "builtin", "What is hearthnet?", node=sofa)
        assert run.returncode == 0
        assert "mesh" in run.stdout
        assert "attic" in run.stderr
        chat = hearthnet("chat", "builtin", node=sofa, stdin="Hello!\n/route\n/bye\n")
        assert chat.returncode == 0
        assert chat.stdout.strip()
        status = json.loads(hearthnet("status", "--json", node=sofa).stdout)
        assert status["node"]["name"] == "sofa"
        peers = json.loads(hearthnet("peers", "--json", node=sofa).stdout)
        assert "attic" in json.dumps(peers)
        models = json.loads(hearthnet("models", "--json", node=sofa).stdout)
        assert "builtin" in json.dumps(models)

    def test_metrics_carry_the_specifications_names(self, sofa: LocalNode) -> None:
        ask(sofa)
        text = httpx.get(f"{sofa.url}/metrics", trust_env=False, timeout=30).text
        for name in (
            "pipeline_construct_ms", "first_token_ms", "tokens_per_second", "shard_latency_ms",
            "failovers_total", "fallback_to_local_total",
        ):  # fmt: skip
            assert f"distributed_inference_{name}" in text
        assert 'shard_latency_ms_count{shard_id="builtin:0-4"}' in text

    def test_the_dashboard_asks_for_what_is_there(self, home: dict[str, LocalNode]) -> None:
        """Every query of docs/reference/grafana.json, by the names and labels of live nodes."""
        ask(home["sofa"])
        labels: dict[str, set[str]] = {}
        for name in ("sofa", "attic"):
            text = httpx.get(f"{home[name].url}/metrics", trust_env=False, timeout=30).text
            for family in text_string_to_metric_families(text):
                counted = "_total" if family.type == "counter" else ""
                # What did not happen here has no series yet, only its name.
                labels.setdefault(family.name + counted, {"instance"})
                for sample in family.samples:
                    labels.setdefault(sample.name, {"instance"}).update(sample.labels)
        for each in (*SERIES, *PRESENT):
            labels[each.shown].update(each.labels)
        page = json.loads((DOCS / "reference/grafana.json").read_text())
        queries = [target for panel in page["panels"] for target in panel["targets"]]
        assert len(queries) > len(page["panels"])
        for query in queries:
            names = set(re.findall(r"(?:hearthnet|distributed_inference)_\w+", query["expr"]))
            assert names
            assert names <= labels.keys()
            asked = re.findall(r"by \(([^)]*)\)", query["expr"])
            wanted = {label for each in asked for label in each.split(", ")}
            wanted |= set(re.findall(r"{{(\w+)}}", query["legendFormat"]))
            assert all(wanted <= labels[name] for name in names), query["expr"]

    def test_events_are_followed_and_resumed(self, sofa: LocalNode) -> None:
        url = f"{sofa.url}/mesh/v1/events"
        headers = {"Last-Event-ID": "0"}
        found = []
        with httpx.stream("GET", url, headers=headers, timeout=20, trust_env=False) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    found.append(json.loads(line.removeprefix("data: ")))
                if len([e for e in found if e["type"] == "peer_up"]) == 3:
                    break
        assert {e["name"] for e in found if e["type"] == "peer_up"} == {"attic", "kitchen", "study"}


@pytest.mark.slow
class TestBadInput:
    def test_an_unknown_model(self, sofa: LocalNode) -> None:
        error = refused(sofa, "/v1/chat/completions", {"model": "nobody", "messages": QUESTION})
        assert (error["status"], error["code"]) == (404, "model_not_found")
        assert "builtin" in error["message"]

    def test_an_over_long_prompt_names_both_numbers(self, sofa: LocalNode) -> None:
        error = refused(
            sofa, "/v1/completions", {"model": "builtin", "prompt": [40] * 5000, "max_tokens": 4}
        )
        assert (error["status"], error["code"]) == (400, "context_length_exceeded")
        assert "5000" in error["message"]
        assert "4096" in error["message"]

    def test_a_chat_that_outgrew_the_context_is_refused_or_goes_on_as_asked(
        self, sofa: LocalNode
    ) -> None:
        book = {"role": "user", "content": "The kettle sings on the hearth. " * 200}
        said = {"role": "assistant", "content": "It does."}
        turns = [*[book, said] * 3, {"role": "user", "content": "Does it?"}]
        chat = {"model": "builtin", "messages": turns, "max_tokens": 2}
        error = refused(sofa, "/v1/chat/completions", chat)
        assert (error["status"], error["code"]) == (400, "context_length_exceeded")
        asked = {"model": "builtin", "input": turns, "max_output_tokens": 2}
        for path, body in (("chat/completions", chat), ("responses", asked)):
            answer = sofa.post(f"/v1/{path}", {**body, "truncation": "auto"}).json()
            assert answer["hearthnet"]["left_out_messages"] == 2
        ollamas = {"model": "builtin", "messages": turns, "options": {"num_predict": 2}}
        for truncate, status in ((None, 200), (False, 400)):
            response = sofa.post("/api/chat", {**ollamas, "stream": False, "truncate": truncate})
            assert response.status_code == status
        typed = "".join(f"{turn['content'].strip()}\n" for turn in turns if turn is not said)
        told = hearthnet("chat", "builtin", node=sofa, stdin=f"/set max_tokens 2\n{typed}/bye\n")
        assert "without the first 2 messages: the context has no room for all" in told.stderr
        assert told.returncode == 0

    def test_a_token_outside_the_vocabulary(self, sofa: LocalNode) -> None:
        error = refused(sofa, "/v1/completions", {"model": "builtin", "prompt": [1, 10**6]})
        assert (error["code"], error["param"]) == ("bad_request", "prompt")

    def test_malformed_json_and_unknown_fields(self, sofa: LocalNode) -> None:
        raw = httpx.post(
            f"{sofa.url}/v1/completions", content=b"{", trust_env=False, timeout=30,
            headers={"content-type": "application/json"},
        )  # fmt: skip
        assert raw.status_code == 400
        error = refused(sofa, "/v1/completions", {"model": "builtin", "prompt": "a", "wat": 1})
        assert "wat" in error["message"]

    def test_layers_outside_the_model(self, tmp_path: Path) -> None:
        run = hearthnet("up", "--layers", "0-99", "--state-dir", str(tmp_path))
        assert run.returncode != 0
        assert "0-99" in run.stderr
        assert "0-7" in run.stderr

    def test_a_truncated_and_a_pickled_checkpoint(self, tmp_path: Path) -> None:
        broken = make_checkpoint(tmp_path / "broken", "llama", layers=2)
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        run = hearthnet("up", "--model", str(broken), "--state-dir", str(tmp_path / "s1"))
        assert run.returncode != 0
        assert "model.safetensors" in run.stderr
        pickled = make_checkpoint(tmp_path / "pickled", "llama", layers=2)
        (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
        run = hearthnet("up", "--model", str(pickled), "--state-dir", str(tmp_path / "s2"))
        assert run.returncode != 0
        assert "pickle" in run.stderr.lower()

    def test_a_port_in_use(self, sofa: LocalNode, tmp_path: Path) -> None:
        for flag, port in (("--api-port", sofa.record.api_port), ("--port", sofa.record.port)):
            other = "--port" if flag == "--api-port" else "--api-port"
            state = tmp_path / flag.strip("-")
            run = hearthnet(
                "up", flag, str(port), other, "0", "--layers", "none", "--interface", "127.0.0.1",
                "--state-dir", str(state),
            )  # fmt: skip
            assert run.returncode != 0
            assert str(port) in run.stderr
            assert f"another with {flag}" in run.stderr
            assert "founded" not in run.stdout
            paths = StatePaths(state)
            assert not paths.hearth.exists(), "a start that fails founds no hearth"
            assert not paths.identity_key.exists()

    def test_an_unknown_interface_names_the_existing_ones(self, tmp_path: Path) -> None:
        run = hearthnet("up", "--interface", "nope0", "--state-dir", str(tmp_path))
        assert run.returncode != 0
        assert "lo" in run.stderr

    def test_two_daemons_on_one_state_directory(self, sofa: LocalNode) -> None:
        run = hearthnet("up", "--port", "0", "--api-port", "0", node=sofa)
        assert run.returncode != 0
        assert "already runs" in run.stderr


@pytest.fixture(scope="module")
def twins(
    start_node: StartNode, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LocalNode, LocalNode]:
    """Two nodes with other weights under one name; the first has half of a model more."""
    root = tmp_path_factory.mktemp("twins")
    one, two, half = (
        make_checkpoint(root / name, "llama", layers=8, seed=seed)
        for seed, name in enumerate(("one", "two", "half"), 1)
    )
    left = start_node(
        "left", "--model", f"{one}=twins", "--model", f"{half}=half", "--layers", "0-3"
    )
    right = start_node("right", "--model", f"{two}=twins", "--layers", "4-7")
    left.wait_up()
    right.wait_up()
    return left, right


@pytest.mark.slow
class TestLives:
    def test_a_span_nobody_serves(self, twins: tuple[LocalNode, LocalNode]) -> None:
        node, _ = twins
        deadline = time.monotonic() + 60
        while "no node serves layers 4-7 of half" not in str(missing := readiness(node)):
            assert time.monotonic() < deadline, missing
            time.sleep(0.2)
        error = refused(
            node, "/v1/completions",
            {"model": "half", "prompt": [5, 6], "max_tokens": 2, "fallback_to_local": False},
        )  # fmt: skip
        assert (error["status"], error["code"]) == (503, "shard_unavailable")
        assert "4-7" in error["message"]

    def test_other_weights_under_the_same_name(self, twins: tuple[LocalNode, LocalNode]) -> None:
        left, _ = twins
        deadline = time.monotonic() + 60
        error: dict[str, Any] = {}
        while time.monotonic() < deadline and error.get("code") != "weights_mismatch":
            body = {
                "model": "twins", "prompt": [5, 6], "max_tokens": 2, "fallback_to_local": False,
            }  # fmt: skip
            error = refused(left, "/v1/completions", body)
            time.sleep(0.2)
        assert (error["status"], error["code"]) == (409, "weights_mismatch")
        assert "right" in error["message"]

    # Last of those that share it: it does not come back.
    def test_everything_a_daemon_started_dies_with_it(
        self, twins: tuple[LocalNode, LocalNode]
    ) -> None:
        _, node = twins
        assert node.process is not None
        deadline = time.monotonic() + 30
        children: list[psutil.Process] = []
        while len(children) < 3 and time.monotonic() < deadline:
            children = psutil.Process(node.process.pid).children(recursive=True)
            time.sleep(0.05)
        # The warm parent, what it has forked (asker, shard, perhaps a fetcher), and perhaps what
        # measures.
        assert len(children) >= 3
        node.kill()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive

    def test_detach_status_restart_logs_and_down(self, tmp_path: Path) -> None:
        state = ["--state-dir", str(tmp_path / "state")]
        model = shutil.copytree(checkpoint_dir(), tmp_path / "kept")
        up = hearthnet(
            "up", "--detach", "--layers", "none", "--port", "0", "--api-port", "0",
            "--interface", "127.0.0.1", "--name", "cellar", "--model", str(model), *state,
        )  # fmt: skip
        assert up.returncode == 0, up.stderr
        assert "OPENAI_BASE_URL" in up.stdout
        model.rename(tmp_path / "away")
        in_vain = hearthnet("restart", *state)
        assert in_vain.returncode == 4
        assert "[model_not_found]" in in_vain.stderr
        assert hearthnet("status", *state).returncode == 0, "it was stopped all the same"
        (tmp_path / "away").rename(model)
        again = hearthnet("restart", *state)
        assert again.returncode == 0, again.stderr
        first, second = (re.findall(r"pid (\d+)", each.stdout)[0] for each in (up, again))
        assert first != second
        assert json.loads(hearthnet("status", "--json", *state).stdout)["node"]["name"] == "cellar"
        log = StatePaths(tmp_path / "state").daemon_log
        before = log.read_text().splitlines()
        printed = hearthnet("logs", "-n", "2", *state).stdout.splitlines()
        lines = log.read_text().splitlines()  # it may have said more before and after that
        assert printed in [lines[end - 2 : end] for end in range(len(before), len(lines) + 1)]
        assert hearthnet("down", *state).returncode == 0
        assert hearthnet("status", *state).returncode == 3
        assert hearthnet("restart", *state).returncode == 3
        assert "no daemon runs now" in hearthnet("logs", *state).stderr


def test_a_model_is_measured_over_its_route(sofa: LocalNode) -> None:
    state = ["--state-dir", str(sofa.state_dir)]
    few = ["--prompt", "40", "--tokens", "4", "--answers", "3", "--rounds", "1"]
    measured = hearthnet("bench", *few, "--json", *state)
    assert measured.returncode == 0, measured.stderr
    told = json.loads(measured.stdout)
    assert (told["prompt_tokens"], told["tokens"], set(told["together"])) == (40, 4, {"3"})
    assert [hop["layers"] for hop in told["route"]] == [hop["layers"] for hop in told["hops"]]
    assert told["node"] == "sofa", "whose own layers no cable brings nearer"
    assert min(told["prompt_tokens_per_second"], told["tokens_per_second"]) > 0
    in_words = hearthnet("bench", "builtin", *few, *state).stdout
    assert "3 answers at once" in in_words
    assert "most of the time: " in in_words


def readiness(node: LocalNode) -> list[str]:
    response = httpx.get(f"{node.url}/readyz", trust_env=False, timeout=10)
    missing: list[str] = response.json().get("missing", [])
    return missing
