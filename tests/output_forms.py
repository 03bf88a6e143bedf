"""Outputs as models write them, good and broken, and what each of them is. The ids name forms that were reported for real servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outputs import INNER, PARIS, WEATHER, xml


@dataclass(frozen=True)
class Form:
    """An output and what it is. rules: must be among the remarks; when there are none, there are no remarks."""

    name: str
    text: str
    reasoning: str = ""
    content: str = ""
    calls: Sequence[Any] = ()
    rules: Sequence[str] = ()
    thinking: bool = False
    truncated: bool = False


FORMS = [
    Form("P01 one call", PARIS, calls=[WEATHER]),
    Form("P02 text before", "Let me look.\n\n" + PARIS, content="Let me look.\n\n", calls=[WEATHER]),
    Form(
        "P02 after thinking", "I look.\n</think>\n\nWell.\n" + PARIS, reasoning="I look.", content="Well.\n", calls=[WEATHER], thinking=True
    ),
    Form("P03 no opener", INNER + "\n</tool_call>", calls=[WEATHER], rules=["O001"]),
    Form("P03 no opener, text before", "Sure.\n" + INNER, content="Sure.\n", calls=[WEATHER], rules=["O001", "O002"]),
    Form(
        "P04 unknown in prose",
        "Write <function=foo> here.\n<function=foo>\n</function>",
        content="Write <function=foo> here.\n<function=foo>\n</function>",
    ),
    Form("P04 known inside a line", "Write <function=ping></function> to ping.", content="Write <function=ping></function> to ping."),
    Form("P04 fenced", f"Like this:\n```\n{PARIS}\n```\nDone.", content=f"Like this:\n```\n{PARIS}\n```\nDone.", rules=["O006"]),
    Form("P04 a fence before is closed", f"```\nx\n```\n{PARIS}", content="```\nx\n```\n", calls=[WEATHER]),
    Form("P05 no </tool_call>", "<tool_call>\n" + INNER, calls=[WEATHER], rules=["O002"]),
    Form("P05 no </tool_call>, text behind", "<tool_call>\n" + INNER + "\nDone.", content="Done.", calls=[WEATHER], rules=["O002", "O020"]),
    Form(
        "P06 no </function>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n",
        calls=[WEATHER],
        rules=["O002"],
    ),
    Form(
        "P06 but one is missing",
        "<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parameter>",
        content="<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parameter>",
        rules=["O017"],
    ),
    Form(
        "P06 </tool_call> alone",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</tool_call>",
        calls=[WEATHER],
        rules=["O002"],
    ),
    Form(
        "P06 value open",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        content="<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        rules=["O002"],
    ),
    Form(
        "no </parameter>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</function>\n</tool_call>",
        calls=[("get_weather", {"city": "Paris", "days": 3})],
        rules=["O002"],
    ),
    Form(
        "no </parameter>, another call",
        f"<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</function>\n</tool_call>\n{xml('ping')}",
        calls=[WEATHER, ("ping", {})],
        rules=["O002"],
    ),
    Form(
        "P08 doubled </parameter>",
        xml("get_weather", ("city", "Paris\n</parameter>"), ("days", "2")),
        calls=[("get_weather", {"city": "Paris", "days": 2})],
        rules=["O021"],
    ),
    Form(
        "P10 malformed opener",
        "<tool_call>\n<function=get_weather>\n<parameter=\nx\n</parameter>\n<parameter=city>\nParis\n</parameter>\n</function>"
        "\n</tool_call>",
        calls=[WEATHER],
        rules=["O021"],
    ),
    Form(
        "P10 malformed opener behind a value",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=\nx\n"
        "</parameter>\n</function>\n</tool_call>",
        calls=[WEATHER],
        rules=["O021"],
    ),
    Form(
        "P11 </parameter> in a value",
        xml("write_file", ("path", "a"), ("content", "x </parameter> y\n</parameter>\nz")),
        calls=[("write_file", {"path": "a", "content": "x </parameter> y\n</parameter>\nz"})],
        rules=["O004"],
    ),
    Form(
        "P12 </tool_call> in a value",
        xml("write_file", ("path", "a"), ("content", "</tool_call>\n</function>\nend")),
        calls=[("write_file", {"path": "a", "content": "</tool_call>\n</function>\nend"})],
        rules=["O004"],
    ),
    Form(
        "P12 a whole call in a value",
        xml("write_file", ("content", f"Example:\n{PARIS}\nend"), ("path", "a")),
        calls=[("write_file", {"content": f"Example:\n{PARIS}\nend", "path": "a"})],
        rules=["O004"],
    ),
    Form(
        "P12 its closers in a value",
        xml("write_file", ("path", "a"), ("content", "</function>\n</tool_call>\nend")),
        calls=[("write_file", {"path": "a", "content": "</function>\n</tool_call>\nend"})],
        rules=["O004"],
    ),
    Form(
        "P12 only an opener in a value",
        xml("write_file", ("path", "a"), ("content", "<tool_call>\n<function=get_weather>\nend")),
        calls=[("write_file", {"path": "a", "content": "<tool_call>\n<function=get_weather>\nend"})],
        rules=["O002"],
    ),
    Form(
        "parameters listed in a value",
        xml("write_file", ("path", "a"), ("content", "<parameter=city>\nx\n</parameter>\n<parameter=days>\n1\n</parameter>\nend")),
        calls=[("write_file", {"path": "a", "content": "<parameter=city>\nx\n</parameter>\n<parameter=days>\n1\n</parameter>\nend"})],
        rules=["O004"],
    ),
    Form("P13 a parameter twice", xml("get_weather", ("city", "Paris"), ("city", "Rome")), calls=[WEATHER], rules=["O018"]),
    Form(
        "P14 on one line",
        "<tool_call><function=get_weather><parameter=city>Paris</parameter><parameter=days>2</parameter></function></tool_call>",
        calls=[("get_weather", {"city": "Paris", "days": 2})],
    ),
    Form(
        "P15 newlines and indent kept",
        xml("write_file", ("path", "a"), ("content", "    x = 1\n\n")),
        calls=[("write_file", {"path": "a", "content": "    x = 1\n\n"})],
    ),
    Form("P16 empty values", xml("write_file", ("path", "a"), ("content", "")), calls=[("write_file", {"path": "a", "content": ""})]),
    Form("P16 empty number", xml("get_weather", ("city", "Paris"), ("days", "")), calls=[WEATHER]),
    Form("P17 no arguments", "<tool_call>\n<function=ping>\n</function>\n</tool_call>", calls=[("ping", {})]),
    Form("P17 no arguments, one line", "<tool_call><function=ping></function></tool_call>", calls=[("ping", {})]),
    Form("P20 call ends thinking", PARIS, calls=[WEATHER], rules=["O005"], thinking=True),
    Form("P23 call inside thinking", "I call it.\n" + PARIS, reasoning="I call it.", calls=[WEATHER], rules=["O005"], thinking=True),
    Form(
        "P24 quoted in thinking",
        f"First {PARIS} I write.\n</think>\n\n{xml('ping')}",
        reasoning=f"First {PARIS} I write.",
        calls=[("ping", {})],
        rules=["O006"],
        thinking=True,
    ),
    Form("P24 cut off, so unproved", f"First {PARIS}", reasoning=f"First {PARIS}", thinking=True, truncated=True),
    Form(
        "P24 unfinished in thinking",
        "So <tool_call>\n<function=ping> it is",
        reasoning="So <tool_call>\n<function=ping> it is",
        thinking=True,
    ),
    Form("P25 template opened thinking", "Hm.\n</think>\n\nHello!", reasoning="Hm.", content="Hello!", thinking=True),
    Form("P25 model opens thinking too", "<think>\nHm.\n</think>\n\nHello!", reasoning="Hm.", content="Hello!", thinking=True),
    Form("model opens thinking", "<think>\nHm.\n</think>\n\nHello!", reasoning="Hm.", content="Hello!"),
    Form("P26 not thinking", "Hello </think> world", content="Hello </think> world"),
    Form("doubled </think>", "Hm.</think>\n</think>\n\nHello", reasoning="Hm.", content="Hello", rules=["O021"], thinking=True),
    Form("P28 two blocks", PARIS + "\n" + xml("ping"), calls=[WEATHER, ("ping", {})]),
    Form("P28 one block", f"<tool_call>\n{INNER}\n<function=ping>\n</function>\n</tool_call>", calls=[WEATHER, ("ping", {})]),
    Form("P28 one block, empty first", f"<tool_call>\n<function=ping>\n</function>\n{INNER}\n</tool_call>", calls=[("ping", {}), WEATHER]),
    Form("P28 no close between", f"<tool_call>\n{INNER}\n{xml('ping')}", calls=[WEATHER, ("ping", {})], rules=["O002"]),
    Form(
        "P28 two JSON in a block",
        '<tool_call>\n{"name":"ping","arguments":{}}\n{"name":"get_weather","arguments":{"city":"Paris"}}\n</tool_call>',
        calls=[("ping", {}), WEATHER],
    ),
    Form("P29 text behind", "A.\n\n" + PARIS + "\nB.", content="A.\n\nB.", calls=[WEATHER], rules=["O020"]),
    Form("P31 JSON", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', calls=[WEATHER]),
    Form(
        "JSON, arguments a string",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        calls=[WEATHER],
    ),
    Form("JSON, no close", '<tool_call>\n{"name": "ping", "arguments": {}}', calls=[("ping", {})], rules=["O002"]),
    Form("JSON, text behind", '<tool_call>\n{"name": "ping"}\nDone.', content="Done.", calls=[("ping", {})], rules=["O002", "O020"]),
    Form(
        "JSON, closers and braces in a string",
        '<tool_call>\n{"name": "write_file", "arguments": {"path": "a", "content": "</tool_call> } \\" {"}}\n</tool_call>',
        calls=[("write_file", {"path": "a", "content": '</tool_call> } " {'})],
    ),
    Form(
        "JSON, braces open",
        '<tool_call>\n{"name": "ping", "arguments": {}\n</tool_call>',
        content='<tool_call>\n{"name": "ping", "arguments": {}\n</tool_call>',
        rules=["O012"],
    ),
    Form(
        "JSON, quote open, then another call",
        f'<tool_call>\n{{"name": "ping}}\n</tool_call>\n{PARIS}',
        content='<tool_call>\n{"name": "ping}\n</tool_call>\n',
        calls=[WEATHER],
        rules=["O012"],
    ),
    Form(
        "JSON, quote open, then text",
        '<tool_call>\n{"name": "ping}\n</tool_call>\nSorry.',
        content='<tool_call>\n{"name": "ping}\n</tool_call>\nSorry.',
        rules=["O012"],
    ),
    *(
        Form(f"P30 {name}", f"<tool_call>\n{text}\n</tool_call>", calls=[call], rules=["O013"])
        for name, text, call in (
            ("trailing comma", '{"name": "get_weather", "arguments": {"city": "Paris",},}', WEATHER),
            ("line comment", '{"name": "get_weather", // it rains "there"\n "arguments": {"city": "Paris"}}', WEATHER),
            ("block comment", '{"name": "get_weather", "arguments": {/* a */ "city": "Paris"}}', WEATHER),
            ("single quotes", "{'name': 'get_weather', 'arguments': {'city': 'Paris'}}", WEATHER),
            ("apostrophe", "{'name': 'get_weather', 'arguments': {'city': 'it's'}}", ("get_weather", {"city": "it's"})),
            ("odd quotation mark", "{'name': 'get_weather', 'arguments': {'city': '5\"'}}", ("get_weather", {"city": '5"'})),
            ("raw newline", '{"name": "get_weather", "arguments": {"city": "a\nb"}}', ("get_weather", {"city": "a\nb"})),
            ("Python literals", '{"name": "typed", "arguments": {"flag": True, "maybe": None}}', ("typed", {"flag": True, "maybe": None})),
            ("fence", '{"name": "typed", "arguments": "```json\\n{\\"n\\": 1}\\n```"}', ("typed", {"n": 1})),
            ("inner quotes", '{"name": "get_weather", "arguments": {"city": "say "hi" now"}}', ("get_weather", {"city": 'say "hi" now'})),
            ("path", '{"name": "Read", "arguments": {"file_path": "C:\\Users\\me"}}', ("Read", {"file_path": "C:\\Users\\me"})),
        )
    ),
    *(
        Form(f"P30 not repaired: {name}", whole, content=whole, rules=["O012"])
        for name, whole in (
            (name, f"<tool_call>\n{text}\n</tool_call>")
            for name, text in (
                ("string open", '{"name": "ping", "arguments": {"a": "x}'),
                ("list open", '{"name": "edit", "arguments": {"edits": ["rm -rf build","ls"}}'),
                ("no value", '{"name": "typed", "arguments": {"n": , "x": 1}}'),
                ("a number changed", '{"name": "typed", "arguments": {"n": 03106}}'),
                ("escapes and a path", '{"name": "Read", "arguments": {"file_path": "C:\\path\\new"}}'),
            )
        )
    ),
    Form("P30 prose", "<tool_call>\n{ping, please}\n</tool_call>", content="<tool_call>\n{ping, please}\n</tool_call>", rules=["O014"]),
    Form(
        "P30 in a value",
        xml("edit", ("edits", "[{'old': \"a's\", 'new': None,}]")),
        calls=[("edit", {"edits": [{"old": "a's", "new": None}]})],
        rules=["O013"],
    ),
    Form(
        "P32 CJK quotes",
        xml("typed", ("box", '{“nodes”：[]，“「」”：“a"b”}')),
        calls=[("typed", {"box": {"nodes": [], "「」": 'a"b'}})],
        rules=["O013"],
    ),
    Form(
        "P32 CJK quotes in a string stay",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "“巴黎”，"}}\n</tool_call>',
        calls=[("get_weather", {"city": "“巴黎”，"})],
    ),
    Form(
        "P34 a bracket too many",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}}\n</tool_call>\nDone.',
        content="Done.",
        calls=[WEATHER],
        rules=["O020", "O021"],
    ),
    Form(
        "P34 data behind",
        '<tool_call>\n{"name": "ping"} and more\n</tool_call>',
        content=" and more\n",
        calls=[("ping", {})],
        rules=["O002", "O020"],
    ),
    Form(
        "JSON, one of two works",
        '<tool_call>\n{"name": "ping"}\n{"name": "pong"}\n</tool_call>',
        content='{"name": "pong"}',
        calls=[("ping", {})],
        rules=["O011"],
    ),
    Form(
        "JSON, no object",
        '<tool_call>\n{"name": "ping", "arguments": [1]}\n</tool_call>',
        content='<tool_call>\n{"name": "ping", "arguments": [1]}\n</tool_call>',
        rules=["O014"],
    ),
    Form(
        "JSON, key twice",
        '<tool_call>\n{"name": "ping", "name": "Read"}\n</tool_call>',
        content='<tool_call>\n{"name": "ping", "name": "Read"}\n</tool_call>',
        rules=["O012"],
    ),
    Form("P33 stray close", PARIS + "\n</function_invocation>\n", calls=[WEATHER], rules=["O021"]),
    *(
        Form(f"P33 {name}", text, content=text)
        for name, text in (
            ("another dialect", '<function_calls>\n<invoke name="ping">\n</invoke>\n</function_calls>'),
            ("a write-up's markup", '|tool_call|{"name": "ping"}|eot_id|'),
            ("Llama's", '<|python_tag|>{"name": "ping", "parameters": {}}'),
        )
    ),
    Form("P35 camelCase", xml("getWeather", ("city", "Paris")), calls=[WEATHER], rules=["O010"]),
    Form("P35 kebab", xml("GET-WEATHER", ("city", "Paris")), calls=[WEATHER], rules=["O010"]),
    Form("P35 declared spelling", xml("read", ("file_path", "a")), calls=[("Read", {"file_path": "a"})], rules=["O010"]),
    Form("P36 a name that is almost one", "<function=ping_all>\n</function>", content="<function=ping_all>\n</function>"),
    Form("P36 quoted in a line", "Use `<tool_call>`, `<function=ping>`.", content="Use `<tool_call>`, `<function=ping>`.", rules=["O006"]),
    Form("P37 unknown tool", "Hm.\n" + xml("launch", ("x", "1")), content="Hm.\n" + xml("launch", ("x", "1")), rules=["O011"]),
    Form(
        "P37 unknown tool, then a known one",
        xml("launch", ("x", "1")) + "\n" + PARIS,
        content=xml("launch", ("x", "1")) + "\n",
        calls=[WEATHER],
        rules=["O011"],
    ),
    Form(
        "P38 unknown parameter kept",
        xml("get_weather", ("city", "Paris"), ("lang", "fr")),
        calls=[("get_weather", {"city": "Paris", "lang": "fr"})],
    ),
    Form(
        "P38 unknown parameter refused",
        xml("Read", ("file_path", "a"), ("mode", "r")),
        calls=[("Read", {"file_path": "a"})],
        rules=["O016"],
    ),
    Form("P39 required is missing", xml("get_weather", ("days", "2")), content=xml("get_weather", ("days", "2")), rules=["O017"]),
    Form("P40 optional first", xml("get_weather", ("days", "2"), ("city", "Paris")), calls=[("get_weather", {"days": 2, "city": "Paris"})]),
    Form(
        "P41 cut off in a value",
        "Hm.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        content="Hm.\n",
        rules=["O003"],
        truncated=True,
    ),
    Form("P41 cut off before the last closer", PARIS.removesuffix("\n</tool_call>"), rules=["O003"], truncated=True),
    Form("P41 cut off in the opener", "Hm. <tool_call>\n", content="Hm. ", rules=["O003"], truncated=True),
    Form("P41 cut off in JSON", '<tool_call>\n{"name": "ping"}', rules=["O003"], truncated=True),
    Form("P41 the call before is whole", PARIS + "\n<tool_call>\n<function=pi", calls=[WEATHER], rules=["O003"], truncated=True),
    Form(
        "P42 prose about calls",
        "A <tool_call> tag opens it, then `<tool_call>` again.",
        content="A <tool_call> tag opens it, then `<tool_call>` again.",
        rules=["O006"],
    ),
    Form("P42 far away", "<tool_call>" + " " * 70 + "{", content="<tool_call>" + " " * 70 + "{"),
    Form("P42 at the end", "It ends with <tool_call>", content="It ends with <tool_call>"),
    Form("P42 half a tag at the end", "a < b <tool_", content="a < b <tool_"),
    Form(
        "P46 shell text",
        xml("write_file", ("path", "a"), ("content", "pwd && ls -la > 'x'")),
        calls=[("write_file", {"path": "a", "content": "pwd && ls -la > 'x'"})],
    ),
    Form(
        "P45 numbers",
        xml("typed", ("n", "3.0"), ("x", "72.00000"), ("maybe", "12.0")),
        calls=[("typed", {"n": 3, "x": 72.0, "maybe": 12})],
    ),
    Form(
        "P47 empty arguments where some are needed",
        '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>',
        content='<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>',
        rules=["O017"],
    ),
    Form("P48 CRLF", PARIS.replace("\n", "\r\n"), calls=[WEATHER]),
    Form(
        "a number that is none",
        xml("get_weather", ("city", "Paris"), ("days", "soon")),
        content=xml("get_weather", ("city", "Paris"), ("days", "soon")),
        rules=["O015"],
    ),
    Form(
        "a member that the enum does not have",
        xml("get_weather", ("city", "Paris"), ("unit", "kelvin")),
        content=xml("get_weather", ("city", "Paris"), ("unit", "kelvin")),
        rules=["O015"],
    ),
    Form("nothing", ""),
    Form("only thinking", "Hm.\n", reasoning="Hm.", thinking=True),
    Form("only whitespace", " \n", content=" \n"),
    Form("whitespace kept", "\n  Hello \n", content="\n  Hello \n"),
    Form("indent behind thinking", "x</think>\n\n    code", reasoning="x", content="    code", thinking=True),
]
