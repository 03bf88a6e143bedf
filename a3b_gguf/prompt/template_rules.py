"""Rules over the chat template of a file: what it does with a battery of small conversations, and what its text holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from a3b_gguf.prompt.battery import (
    ANSWER,
    DEVELOPER,
    NAME,
    NEXT,
    ODD,
    RESULT,
    ROLE,
    SYSTEM,
    THOUGHT,
    USER,
    VALUE,
    Probes,
)
from a3b_gguf.prompt.findings import Hit, Rule
from a3b_gguf.prompt.probes import MARK
from a3b_gguf.prompt.profiles import Profile
from a3b_gguf.template import END_THINK, MAX_TEMPLATE_CHARS, THINK, Template, known_name, template_sha256

WHERE = "tokenizer.chat_template"
# llama-cpp-python's constant CHATML_CHAT_TEMPLATE (llama_chat_format.py): a template equal to it is replaced by a formatter in Python.
CHATML_CONSTANT = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WORDS_OF_CONTENT = re.compile(
    r"""(['"])(?P<word>[A-Za-z][^'"<>|{}]{2,60})\1\s+in\s+(?:message(?:\.content|\[['"]content['"]\])|content)\b"""
)
HARMLESS_WORDS = ("/think", "/no_think")
OUTWARD = re.compile(r"https?://[^\s'\"<>]+|<!--|[A-Za-z0-9+/]{80,}={0,2}")


@dataclass(frozen=True, slots=True)
class TemplateView:
    """text: as it stands in the file, None when it is missing. error: why it did not compile. probes, profile, template: None then.

    variants: names of further templates in the file. bos, eos: texts of the tokens. add_bos: of the file. single: delimiters of the
    template that are one token of the vocabulary; None when there is no vocabulary. arch: the file's architecture.
    """

    text: str | None
    error: str = ""
    template: Template | None = None
    probes: Probes | None = None
    profile: Profile | None = None
    variants: tuple[str, ...] = ()
    bos: str = ""
    eos: str = ""
    add_bos: bool = False
    single: frozenset[str] | None = None

    def shows(self, name: str) -> str:
        return self.probes.text(name) if self.probes else ""

    def renders(self, name: str) -> bool:
        return bool(self.probes and self.probes.renders(name))

    @property
    def works(self) -> bool:
        """Whether there is anything to judge."""
        return self.probes is not None and self.probes.bad is None and self.renders("user")


def _is_safety(words: str) -> bool:
    return "sandbox" in words or "(T005)" in words


def _is_limit(words: str) -> bool:
    return any(part in words for part in ("CPU time", "too much memory", "writes more than"))


def _trouble(view: TemplateView) -> str:
    """Why the template cannot be used at all, "" when it can."""
    return view.error or (view.probes.bad.message if view.probes and view.probes.bad else "")


def is_there(view: TemplateView) -> Iterator[Hit]:
    if view.text is None:
        yield Hit(WHERE, "there is no template: llama-cpp-python would speak llama-2 to this model, llama.cpp ChatML")


def is_a_text(view: TemplateView) -> Iterator[Hit]:
    if view.text is None:
        return
    if not view.text.strip():
        yield Hit(WHERE, "the template is empty")
    elif len(view.text) > MAX_TEMPLATE_CHARS:
        yield Hit(WHERE, f"the template has {len(view.text):,} characters, at most {MAX_TEMPLATE_CHARS:,} are read")


def compiles(view: TemplateView) -> Iterator[Hit]:
    if view.text and "syntax error" in view.error and "No filter" not in view.error and "No test" not in view.error:
        yield Hit(WHERE, view.error)
    elif "nested too deeply" in view.error:
        yield Hit(WHERE, view.error)


def uses_what_is_there(view: TemplateView) -> Iterator[Hit]:
    if "No filter" in view.error or "No test" in view.error:
        yield Hit(WHERE, view.error)
        return
    for name in ("user", "system", "tools", "call"):
        words = view.probes.outcomes[name].error if view.probes else ""
        if "is undefined" in words and "UndefinedError" in words and "object" not in words:
            yield Hit(WHERE, f"it uses what no renderer has: {words}", severity="warning")
            return


def stays_in_its_sandbox(view: TemplateView) -> Iterator[Hit]:
    if _is_safety(_trouble(view)):
        yield Hit(WHERE, _trouble(view))


def stays_within_limits(view: TemplateView) -> Iterator[Hit]:
    if _is_limit(_trouble(view)):
        yield Hit(WHERE, _trouble(view))


def renders_a_chat(view: TemplateView) -> Iterator[Hit]:
    if view.probes and not view.probes.bad and not view.renders("system"):
        yield Hit(WHERE, f"it does not render a system and a user message: {view.probes.outcomes['system'].error}")


def renders_a_question(view: TemplateView) -> Iterator[Hit]:
    if view.probes and not view.probes.bad and not view.renders("user"):
        yield Hit(WHERE, f"it does not render a user message alone: {view.probes.outcomes['user'].error}")


def shows_the_system_message(view: TemplateView) -> Iterator[Hit]:
    text = view.shows("system")
    if not view.works or not text:
        return
    if SYSTEM not in text:
        yield Hit(WHERE, "the system message is not in the prompt")
    elif USER in text and text.index(SYSTEM) > text.index(USER):
        yield Hit(WHERE, "the system message does not come first")
    elif USER in text and not MARK.search(text[text.index(SYSTEM) : text.index(USER)]):
        yield Hit(WHERE, "the system message is folded into the user's turn", severity="note")


def shows_every_message(view: TemplateView) -> Iterator[Hit]:
    if not view.works:
        return
    text, expected = view.shows("turns"), (USER, ANSWER, NEXT)
    if not _in_order(text, expected):
        yield Hit(WHERE, "a chat of user, assistant and user is not shown once each, in order")
        return
    chat, marks = ("call with text", (SYSTEM, USER, ANSWER, VALUE, RESULT, NEXT))
    text = view.shows(chat)
    if text and NAME in view.shows("tools") and not _in_order(text, marks):
        missing = [mark for mark in marks if mark not in text]
        yield Hit(
            WHERE, f"a chat with a call and its result is not shown whole, in order: {len(missing)} of {len(marks)} parts are missing"
        )
    elif text and NAME not in view.shows("tools") and RESULT not in text:
        yield Hit(WHERE, "messages of role 'tool' are dropped silently")


def _in_order(text: str, marks: tuple[str, ...]) -> bool:
    places = [text.find(mark) for mark in marks]
    return -1 not in places and places == sorted(places) and all(text.count(mark) == 1 for mark in marks if mark != SYSTEM)


def takes_any_system(view: TemplateView) -> Iterator[Hit]:
    if view.works and view.renders("late system") and view.renders("two systems"):
        yield Hit(WHERE, "it takes late and second system messages, so that a3b must refuse them")


def drops_odd_roles(view: TemplateView) -> Iterator[Hit]:
    if view.works and view.renders("odd role") and ODD not in view.shows("odd role"):
        yield Hit(WHERE, "a message with an unknown role is dropped silently")


def maps_developer(view: TemplateView) -> Iterator[Hit]:
    text = view.shows("developer")
    if DEVELOPER in text and "developer" not in text.replace(DEVELOPER, ""):
        yield Hit(WHERE, "role 'developer' is written as another role")


def shows_tools(view: TemplateView) -> Iterator[Hit]:
    if view.works and NAME not in view.shows("tools"):
        yield Hit(WHERE, "tools are not shown to the model")


def takes_string_arguments(view: TemplateView) -> Iterator[Hit]:
    if not view.works or VALUE not in view.shows("call"):
        return
    if not view.renders("call as string"):
        yield Hit(WHERE, "it fails on arguments that are a string, as OpenAI clients send them")
    elif '\\"key\\"' in view.shows("call as string"):
        yield Hit(WHERE, "arguments that are a string are encoded twice")


def takes_no_content(view: TemplateView) -> Iterator[Hit]:
    if view.works and view.renders("call") and not view.renders("no content"):
        yield Hit(WHERE, "it fails on an answer with calls and without content")


def takes_parts(view: TemplateView) -> Iterator[Hit]:
    if not view.works:
        return
    if view.shows("one part") != view.shows("user"):
        yield Hit(WHERE, "it does not read content that is a list of parts")
    elif f"{USER}{NEXT}" in view.shows("parts"):
        yield Hit(WHERE, "text parts are joined without a separator")


def writes_json_values(view: TemplateView) -> Iterator[Hit]:
    text = view.shows("call")
    if re.search(r">\s*True\s*<", text) or re.search(r">\s*None\s*<", text):
        yield Hit(WHERE, "true and null in arguments are written as Python's True and None")


def opens_the_answer(view: TemplateView) -> Iterator[Hit]:
    if view.works and view.shows("opened") == view.shows("user"):
        yield Hit(WHERE, "add_generation_prompt makes no difference: the model is not asked to answer")


def thinking_can_be_set(view: TemplateView) -> Iterator[Hit]:
    if view.works and view.profile and "enable_thinking" in (view.profile.variables or ()):
        if view.shows("opened on") == view.shows("opened off") and view.shows("on") == view.shows("off"):
            yield Hit(WHERE, "it reads enable_thinking, and the prompt is the same with and without it")


def answer_begins_in_thought(view: TemplateView) -> Iterator[Hit]:
    opener = view.profile.generation_on if view.profile else ""
    if opener.rfind(THINK) > opener.rfind(END_THINK):
        yield Hit(WHERE, "the opener of the answer ends inside a think block: output starts as reasoning")


def keeps_thoughts(view: TemplateView) -> Iterator[Hit]:
    if view.profile and view.profile.preserve != "never" and "preserve_thinking" in (view.profile.variables or ()):
        yield Hit(WHERE, f"thinking of earlier turns is kept {view.profile.preserve}: preserve_thinking")


def writes_empty_thoughts(view: TemplateView) -> Iterator[Hit]:
    if re.search(r"<think>\s*</think>", view.shows("no thought kept")) and "preserve_thinking" in (view.text or ""):
        yield Hit(WHERE, "with preserve_thinking, answers without reasoning get an empty think block")


def history_is_a_prefix(view: TemplateView) -> Iterator[Hit]:
    opened, default = view.shows("opened off"), view.shows("opened")
    if view.works and opened != default and not view.shows("answered off").startswith(opened):
        yield Hit(WHERE, "with enable_thinking false a prompt is no prefix of the next one: each turn is read again from the answer on")


def is_the_same_every_day(view: TemplateView) -> Iterator[Hit]:
    if view.text and re.search(r"strftime_now|date_string|\bdatetime\b", view.text):
        yield Hit(WHERE, "the prompt depends on the day: nothing that was read is of use on the next one")


def has_one_bos(view: TemplateView) -> Iterator[Hit]:
    if view.works and view.bos and view.add_bos and view.shows("system").startswith(view.bos):
        yield Hit(WHERE, f"it writes {view.bos} and tokenizer.ggml.add_bos_token is true: BOS would stand twice")


def does_not_end_itself(view: TemplateView) -> Iterator[Hit]:
    if view.works and view.eos and view.shows("opened").rstrip("\n").endswith(view.eos):
        yield Hit(WHERE, f"the prompt ends with {view.eos}: the model is told that it has answered already")


def _delimiters(view: TemplateView) -> set[str]:
    return {mark for name in ("system opened", "turns") for mark in MARK.findall(view.shows(name))} - {"[INST]", view.bos, view.eos}


def delimiters_are_tokens(view: TemplateView) -> Iterator[Hit]:
    if view.single is not None:
        split = sorted(_delimiters(view) - view.single)
        if split:
            yield Hit(WHERE, f"it writes {', '.join(split)}, which the vocabulary does not have as a token")


def family_is_the_vocabularys(view: TemplateView) -> Iterator[Hit]:
    if view.single is None or not _delimiters(view):
        return
    if not _delimiters(view) & view.single:
        own = sorted(text for text in view.single if MARK.fullmatch(text))
        known = f"; the vocabulary has {', '.join(own[:3])}" if own else ""
        yield Hit(WHERE, f"none of its delimiters ({', '.join(sorted(_delimiters(view)))}) is a token{known}")


def hides_nothing(view: TemplateView) -> Iterator[Hit]:
    text = view.text or ""
    if known_name(text):
        return
    for match in WORDS_OF_CONTENT.finditer(text):
        if match["word"] not in HARMLESS_WORDS:
            line = text.count("\n", 0, match.start()) + 1
            yield Hit(f"{WHERE}, line {line}", f"it looks for the word {match['word']!r} in what is said")
    match_out = OUTWARD.search(text)
    if match_out:
        line = text.count("\n", 0, match_out.start()) + 1
        yield Hit(f"{WHERE}, line {line}", f"it holds {match_out[0][:60]!r}", severity="warning")


def is_known(view: TemplateView) -> Iterator[Hit]:
    if view.text and not known_name(view.text):
        yield Hit(WHERE, f"sha256 {template_sha256(view.text)[:16]}… is none of the known templates")


def has_no_variants(view: TemplateView) -> Iterator[Hit]:
    for name in view.variants:
        yield Hit(f"{WHERE}.{name}", "a further template, which llama-cpp-python never uses")


def is_not_replaced(view: TemplateView) -> Iterator[Hit]:
    if view.text is not None and view.text.strip() == CHATML_CONSTANT:
        yield Hit(WHERE, "llama-cpp-python replaces this very text by a formatter that drops tools, lists and late messages")


def has_unix_lines(view: TemplateView) -> Iterator[Hit]:
    text = view.text or ""
    if "\r" in text or text.startswith("\ufeff"):
        what = "a byte order mark" if text.startswith("\ufeff") else "carriage returns"
        yield Hit(WHERE, f"the template's text holds {what}, which end up in every prompt")


def keeps_content(view: TemplateView) -> Iterator[Hit]:
    if view.works and f"  {USER} \n" not in view.shows("spaces"):
        yield Hit(WHERE, "content is changed: whitespace around it is trimmed")


def reads_wrapped_text(view: TemplateView) -> Iterator[Hit]:
    if not view.works or not view.renders("thought"):
        return
    plain = view.shows("thought").replace(NEXT, f"<tool_response>{NEXT}</tool_response>")
    if view.renders("wrapped") and view.shows("wrapped") != plain:
        yield Hit(WHERE, "user text inside <tool_response> tags is not taken for a question: older thinking may show again")


def roles_are_fixed(view: TemplateView) -> Iterator[Hit]:
    if ROLE in view.shows("odd role"):
        yield Hit(WHERE, "the role of a message is written into the delimiter as it was sent")


def results_open_their_turn(view: TemplateView) -> Iterator[Hit]:
    text = view.shows("tool first")
    if view.works and RESULT in text and not MARK.search(text.partition(RESULT)[0]):
        yield Hit(WHERE, "a tool's result as first message stands in a turn that was never opened")


GIVE_ANOTHER = "convert the model again with the template of its checkpoint (a3b convert --chat-template FILE)"
A3B_DOES = "nothing: a3b does this before it renders"
TEMPLATE_RULES: tuple[Rule[TemplateView], ...] = (
    Rule("T001", "error", "The file has a chat template.", GIVE_ANOTHER, is_there),
    Rule("T002", "error", "The template is a text of at most 256 Ki characters.", GIVE_ANOTHER, is_a_text),
    Rule("T003", "error", "The template compiles.", GIVE_ANOTHER, compiles),
    Rule("T004", "error", "It uses filters, tests and functions that renderers have.", GIVE_ANOTHER, uses_what_is_there),
    Rule("T005", "error", "It stays in its sandbox.", "do not use this file", stays_in_its_sandbox),
    Rule("T006", "error", "It renders within 2 s of CPU time, 1 GiB and 16 Mi characters.", "do not use this file", stays_within_limits),
    Rule("T007", "error", "It renders a system and a user message.", GIVE_ANOTHER, renders_a_chat),
    Rule("T008", "warning", "It renders a user message alone.", "always send a system message", renders_a_question),
    Rule("T009", "error", "The system message is shown, first; inside the user's turn is a note.", GIVE_ANOTHER, shows_the_system_message),
    Rule("T010", "error", "Every message is shown once, in order.", GIVE_ANOTHER, shows_every_message),
    Rule("T011", "note", "It refuses late and second system messages.", A3B_DOES, takes_any_system),
    Rule("T012", "warning", "It refuses unknown roles.", A3B_DOES, drops_odd_roles),
    Rule("T013", "note", "It knows no role 'developer'.", "use it, or --map-developer", maps_developer),
    Rule("T014", "warning", "It shows tools.", "send no tools to this model", shows_tools),
    Rule("T015", "warning", "It reads arguments that are a string.", A3B_DOES, takes_string_arguments),
    Rule("T016", "warning", "It reads an answer without content.", A3B_DOES, takes_no_content),
    Rule("T017", "warning", "It reads content that is a list, its texts kept apart.", A3B_DOES, takes_parts),
    Rule("T018", "warning", "It writes true and null as JSON does.", "prefer the template of Qwen3.6", writes_json_values),
    Rule("T019", "error", "add_generation_prompt opens the answer.", GIVE_ANOTHER, opens_the_answer),
    Rule("T020", "warning", "enable_thinking has an effect where it is read.", GIVE_ANOTHER, thinking_can_be_set),
    Rule("T021", "note", "The opener of the answer leaves no think block open.", A3B_DOES, answer_begins_in_thought),
    Rule("T022", "note", "Thinking of earlier turns is not kept.", "send reasoning_content with preserve_thinking: true", keeps_thoughts),
    Rule("T023", "warning", "No empty think blocks.", "send reasoning_content with each answer", writes_empty_thoughts),
    Rule("T024", "warning", "A prompt is a prefix of the next one, thinking off.", "leave thinking on, or accept it", history_is_a_prefix),
    Rule("T025", "warning", "The prompt does not depend on the time.", "give the date in the system message", is_the_same_every_day),
    Rule("T026", "error", "BOS stands once.", "set tokenizer.ggml.add_bos_token to false", has_one_bos),
    Rule("T027", "warning", "The prompt does not end with EOS.", GIVE_ANOTHER, does_not_end_itself),
    Rule("T028", "error", "Each delimiter is one token of the vocabulary.", GIVE_ANOTHER, delimiters_are_tokens),
    Rule("T029", "error", "The delimiters are those of the vocabulary's family.", GIVE_ANOTHER, family_is_the_vocabularys),
    Rule("T030", "error", "It looks for no words in what is said; links and long codes are a warning.", "read the template", hides_nothing),
    Rule("T031", "note", "It is a known template.", "read it once: it is a program, and runs with every request", is_known),
    Rule("T032", "warning", "There is one template.", "none is needed", has_no_variants),
    Rule("T033", "warning", "It is not llama-cpp-python's ChatML constant.", "use a3b serve, which renders it as it is", is_not_replaced),
    Rule("T034", "warning", "Its lines end with \\n, and no byte order mark begins it.", "write it anew with \\n", has_unix_lines),
    Rule("T035", "note", "It keeps content as it is.", "none is needed", keeps_content),
    Rule("T036", "warning", "It does not treat user text by what it holds.", A3B_DOES, reads_wrapped_text),
    Rule("T037", "warning", "Roles are fixed words.", A3B_DOES, roles_are_fixed),
    Rule("T038", "warning", "A tool's result opens its turn.", A3B_DOES, results_open_their_turn),
)  # fmt: skip
__all__ = ["TEMPLATE_RULES", "THOUGHT", "TemplateView"]
