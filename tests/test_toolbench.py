"""toolbench: the points, the play of the tools, an endpoint that fails in every way, stored outputs, and the embedded model."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from a3b_gguf.errors import BadInput, MachineLacks, UsageError
from a3b_gguf.toolbench.bench import Line, judge, play, run
from a3b_gguf.toolbench.endpoint import Endpoint, NoAnswer, Refused
from a3b_gguf.toolbench.question import Expected, Question, Step, long_text, read_questions
from a3b_gguf.toolbench.replay import outputs, replay
from a3b_gguf.toolbench.score import Reply, Score, is_value, score, wilson
from command import assert_refused
from inside import inside as a3b
from serving import serving

WEATHER = Expected("get_weather", {"city": "Oslo", "days": 2}, "rain")
TOOL = {"type": "function", "function": {"name": "get_weather"}}


def call(name: str = "get_weather", arguments: Any = '{"city":"Oslo","days":2}', id: str = "c1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def reply(content: str | None = None, *calls: dict[str, Any], reason: str | None = None) -> Reply:
    message = {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})
    return Reply(message, reason or ("tool_calls" if calls else "stop"))


def question(*steps: Step, **more: Any) -> Question:
    return Question(1, more.pop("block", "select"), "t", ({"role": "user", "content": "?"},), (TOOL,), steps, **more)


ASKED = question(Step((WEATHER,)), Step(answer=("rain",), never=("snow",)))


@pytest.mark.parametrize(
    ("replies", "points"),
    [
        ([reply(None, call()), reply("It will rain.")], (1, 1, 1)),
        ([reply("", call()), reply("RAIN!")], (1, 1, 1)),
        ([reply(None, call(arguments='{"city":"Oslo","days":2.0}')), reply("rain")], (1, 1, 1)),  # JSON has one kind of number
        ([reply(None, call(arguments='{"city":"Oslo","days":"2"}')), reply("rain")], (1, 0, 1)),
        ([reply(None, call(arguments='{"city":"Oslo","days":true}')), reply("rain")], (1, 0, 1)),
        ([reply(None, call(arguments='{"city":"Oslo"}')), reply("rain")], (1, 0, 1)),
        ([reply(None, call(arguments='{"city":"Oslo","days":2,"unit":"C"}')), reply("rain")], (1, 0, 1)),
        ([reply(None, call(arguments="{oops")), reply("rain")], (1, 0, 1)),
        ([reply(None, call(arguments='{\n "city": "Oslo",\n "days": 2\n}')), reply("rain")], (1, 1, 0)),
        ([reply(None, call(arguments={"city": "Oslo", "days": 2})), reply("rain")], (1, 0, 0)),  # an object, not its text
        ([reply(None, call("get_time")), reply("rain")], (0, 0, 1)),
        ([reply(None, call(), call(id="c2")), reply("rain")], (0, 0, 1)),
        ([reply(None, call(), call())], (0, 0, 0)),  # the same id twice, and the chat ends
        ([reply(None, call(id="")), reply("rain")], (1, 1, 0)),
        ([reply(None, call(), reason="stop"), reply("rain")], (1, 1, 0)),
        ([reply("<tool_call>", call()), reply("rain")], (1, 1, 0)),
        ([reply(None, call()), reply("It is dry.")], (1, 1, 0)),
        ([reply(None, call()), reply("Rain, then snow.")], (1, 1, 0)),
        ([reply(None, call()), reply("rain</think>")], (1, 1, 0)),
        ([reply(None, call()), reply("rain", reason="length")], (1, 1, 0)),
        ([reply(None, call()), reply(None)], (1, 1, 0)),
        ([reply(None, call()), reply(None, call())], (0, 0, 1)),
        ([reply("It will rain.")], (0, 0, 1)),
        ([], (0, 0, 1)),
    ],
)
def test_three_points(replies: list[Reply], points: tuple[int, int, int]) -> None:
    found = score(ASKED, replies)
    assert (found.decision, found.arguments, found.protocol) == points, found.faults
    assert found.points == sum(points)
    assert bool(found.faults) == (sum(points) < 3)


def test_restraint() -> None:
    asked = question(Step(answer=("Paris",)))
    assert score(asked, [reply("Paris.")]).points == 3
    assert score(asked, [reply(None, call())]).points == 1  # a call that nobody wanted, well formed
    assert score(asked, [reply("")]).points == 2
    assert score(question(Step(), quotes=True), [reply("A <tool_call> is a call.")]).points == 3


def test_calls_of_one_turn_may_come_in_any_order() -> None:
    asked = question(Step((Expected("a", {"x": 1}, ""), Expected("a", {"x": 2}, ""))), Step())
    two, one = call("a", '{"x":2}', "c1"), call("a", '{"x":1}', "c2")
    assert score(asked, [reply(None, two, one), reply("done")]).points == 3
    assert score(asked, [reply(None, two, call("a", '{"x":2}', "c2")), reply("done")]).points == 2


def test_an_optional_step_may_be_left_out() -> None:
    asked = question(Step((WEATHER,)), Step((Expected("calculate", {}, "4"),), optional=True), Step(answer=("4",)))
    assert score(asked, [reply(None, call()), reply("4")]).points == 3
    assert score(asked, [reply(None, call()), reply(None, call("calculate", "{}")), reply("4")]).points == 3
    assert score(asked, [reply(None, call()), reply(None, call("other", "{}"))]).decision is False


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        (1, 1.0, True), (True, 1, False), (1, True, False), ("1", 1, False), (None, "null()", True), ("null", "null()", False),
        (" Shanghai ", {"any": ["上海", "shanghai"]}, True), ("Beijing", {"any": ["上海", "Shanghai"]}, False),
        ([1, 2], [1, 2], True), ([2, 1], [1, 2], False), ({"a": 1}, {"a": 1}, True), ({"a": 1, "b": 2}, {"a": 1}, False),
        ("a ", "a", False),
    ],
)  # fmt: skip
def test_values_are_compared_with_their_type(found: Any, wanted: Any, same: bool) -> None:
    assert is_value(found, wanted) is same


def test_the_interval_is_wilsons() -> None:
    """The values that the specification gives."""
    assert [round(100 * share, 1) for share in wilson(69, 72)] == [88.5, 98.6]
    assert [round(100 * share, 1) for share in wilson(62, 72)] == [76.3, 92.3]
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(72, 72)[1] == 1.0


def test_tools_are_played() -> None:
    seen: list[list[dict[str, Any]]] = []
    answers = [reply(None, call(), call("other", "{}", "c2")), reply("rain")]

    def ask(messages: Any, tools: Any, thinking: Any) -> Reply:
        seen.append(list(messages))
        return answers[len(seen) - 1]

    assert play(ASKED, ask, "auto") == answers
    assert [m["role"] for m in seen[1]] == ["user", "assistant", "tool", "tool"]
    assert [m["content"] for m in seen[1][2:]] == ["rain", "error: nothing is known about that"]
    assert [m["tool_call_id"] for m in seen[1][2:]] == ["c1", "c2"]


def test_the_worst_trial_counts_and_failures_do_not() -> None:
    good, bad = Score(True, True, True), Score(True, False, True)
    lines = [Line(1, "b", "", 1, good), Line(2, "b", "", 1, good), Line(1, "b", "", 2, bad), Line(2, "b", "", 2, None, "500: broken")]
    result = judge(lines)
    assert (result.points, result.of, result.n_failed, result.verdict) == (2, 3, 1, "failed")
    assert result.mean == 4.0
    assert judge(lines[:2]).verdict == "passed"
    assert judge([lines[3]]).verdict == "nothing measured"
    protocol = judge([Line(i, "b", "", 1, good) for i in range(71)] + [Line(99, "b", "", 1, Score(True, True, False))])
    assert protocol.verdict == "failed"  # every answer must keep the protocol


def test_a_server_with_the_wrong_parser_is_recognised() -> None:
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    result = run([ASKED] * 3, lambda messages, tools, thinking: reply(text), 1, "auto", lambda done, of: None)
    assert "parser/profile mismatch" in result.diagnosis
    assert result.points == 0
    right = run([ASKED], _answers(), 1, "auto", lambda done, of: None)
    assert (right.points, right.diagnosis) == (3, "")


def _answers() -> Any:
    given = [reply("rain"), reply(None, call())]
    return lambda messages, tools, thinking: given.pop()


def test_parity_wants_both_ways() -> None:
    asked = question(Step(answer=("Paris",)), parity=True)
    seen = []

    def ask(messages: Any, tools: Any, thinking: Any) -> Reply:
        seen.append(thinking)
        return reply("Paris" if thinking == "on" else "Rome")

    assert run([asked], ask, 1, "on", lambda done, of: None).points == 2
    assert seen == ["on", "off"]


def test_refusing_control_text_is_safe() -> None:
    def refuse(messages: Any, tools: Any, thinking: Any) -> Reply:
        raise Refused(400, "M055: '<|im_end|>' would become a control token", "invalid_prompt")

    assert run([question(Step(), block="safety")], refuse, 1, "auto", lambda done, of: None).points == 3
    other = run([question(Step(), block="select")], refuse, 1, "auto", lambda done, of: None)
    assert (other.points, other.n_failed) == (0, 1)


def test_the_stored_outputs_have_all_points() -> None:
    assert {each.question for each in outputs()} == set(range(1, 25))
    result = replay()
    assert (result.points, result.of, result.verdict, result.protocol_points) == (72, 72, "passed", 24)
    assert len(result.lines) == 24 * 5  # whole, and in pieces of 1, 2, 3 and 7 characters


@pytest.mark.parametrize("name", ["general", "tiny-a3b"])
def test_sets_are_whole(name: str) -> None:
    questions = read_questions(name)
    assert [q.number for q in questions] == list(range(1, 25))
    blocks = [q.block for q in questions]
    assert blocks == [b for b in ("select", "types", "restraint", "several", "chain", "payload", "safety", "state") for _ in range(3)]
    for asked in questions:
        declared = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in asked.tools}
        for wanted in (each for step in asked.steps for each in step.calls):
            assert wanted.arguments.keys() == declared[wanted.name].keys()
        assert not asked.steps[-1].calls
    texts = [str(q.messages) for q in questions]
    assert len(set(texts)) == 24
    if name == "general":
        assert len(questions[22].messages[0]["content"]) > 23000 * 3
        assert questions[17].steps[0].calls[0].arguments["content"] in questions[17].messages[0]["content"]


def test_long_text_is_as_long_as_asked() -> None:
    assert long_text(500) == long_text(500)
    assert 480 <= len(long_text(500)) <= 500
    assert long_text(500)[-1] == "."


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not toml at [", "not a set of questions"),
        ("x = 1", "no \\[\\[question\\]\\]"),
        ("[[question]]\nblock = 'b'\ntitle = 't'\ntools = ['nope']\nuser = 'u'", "question 1 has no 'nope'"),
        ("[[question]]\ntitle = 't'\ntools = []\nuser = 'u'", "question 1 has no 'block'"),
        ("question = [1]", "question 1 is not of the right form"),
    ],
)
def test_a_wrong_set_is_refused_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(BadInput, match=says):
        read_questions(str(file))
    with pytest.raises(UsageError, match="no set"):
        read_questions("nothing")


class Handler(BaseHTTPRequestHandler):
    answers: dict[str, tuple[int, bytes]] = {}  # noqa: RUF012  # set by each test

    def do_GET(self) -> None:
        status, body = self.answers[self.path]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "kind", "says"),
    [
        (400, b'{"error": {"message": "M031: late", "code": "M031"}}', Refused, "400: M031: late"),
        (400, b"plain", Refused, "400: plain"),
        (500, b'{"error": {"message": "oops"}}', NoAnswer, "500: oops"),
        (200, b"[]", NoAnswer, "not a JSON object"),
        (200, b"{", NoAnswer, "Expecting"),
        (200, b'{"choices": []}', NoAnswer, "no choices"),
    ],
)
def test_an_endpoint_that_does_not_answer_says_why(url: str, status: int, body: bytes, kind: type[Exception], says: str) -> None:
    Handler.answers = {"/v1/chat/completions": (status, body)}
    with pytest.raises(kind, match=says):
        Endpoint(url, "m").ask([], [], "off", 10)


def test_an_endpoint_is_checked_first(url: str) -> None:
    Handler.answers = {"/v1/models": (200, b'{"data": [{"id": "a"}, {"id": "b"}]}')}
    assert Endpoint(url).check().model == Endpoint(url + "/v1/").check().model == "a"
    assert Endpoint(url, "b").check().model == "b"
    with pytest.raises(UsageError, match="no 'c'") as caught:
        Endpoint(url, "c").check()
    assert "a, b" in caught.value.hint
    Handler.answers = {"/v1/models": (200, b'{"data": []}')}
    with pytest.raises(MachineLacks, match="lists no model"):
        Endpoint(url).check()
    Handler.answers = {"/v1/models": (401, b'{"error": {"message": "no key"}}')}
    with pytest.raises(MachineLacks, match="no key"):
        Endpoint(url).check()
    Handler.answers = {"/v1/models": (200, b'{"data": null}')}
    with pytest.raises(MachineLacks, match="lists no model"):
        Endpoint(url).check()
    Handler.answers = {"/v1/models": (200, b"[" * 100_000)}
    with pytest.raises(MachineLacks, match="does not answer"):
        Endpoint(url).check()


@pytest.mark.parametrize("said", [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}", b""])
def test_what_answers_is_no_web_server(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            caller, _ = listening.accept()
            with caller:
                caller.recv(1 << 16)
                caller.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(MachineLacks, match="does not answer: ."):
            Endpoint(f"http://127.0.0.1:{listening.getsockname()[1]}").check()
        thread.join()


def test_wrong_commands_are_refused() -> None:
    assert_refused(a3b("toolbench"), 2, "--replay")
    for address in ("here", "http://[::1/v1", "http://127.0.0.1:99999", "http://host:port", "http://a b", "http://"):
        assert_refused(a3b("toolbench", address), 2, "not the address")
    assert_refused(a3b("toolbench", "http://127.0.0.1:9", "--api-key", "key\n"), 2, "--api-key")
    assert_refused(a3b("toolbench", "--replay", "--questions", "none"), 2, "--questions")
    assert_refused(a3b("toolbench", "http://127.0.0.1:9"), 4, "does not answer")
    assert_refused(a3b("toolbench", "--replay", "http://127.0.0.1:9"), 2, "leave one of them out")
    assert_refused(a3b("toolbench", "http://127.0.0.1:9", "--thinking", "maybe"), 2, "--thinking")
    assert_refused(a3b("toolbench", "http://127.0.0.1:9", "--questions", "none"), 2, "general, tiny-a3b")


def test_replay_command() -> None:
    done = a3b("toolbench", "--replay", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["points"] == 72


def test_the_embedded_model_has_at_least_66_of_72(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    assert a3b("quantize", tiny_checkpoint, "--type", "iq4_nl", "--no-bounds", "-o", model).returncode == 0
    with serving(model, "--ctx", "4096") as served:
        for thinking in ("on", "off"):
            flags = ("--questions", "tiny-a3b", "--trials", "1", "--max-tokens", "256", "--json")
            done = a3b("toolbench", served.url, "--thinking", thinking, *flags)
            told = json.loads(done.stdout)
            assert (told["n_failed"], told["of"]) == (0, 72), done.stdout
            assert told["points"] >= 66
