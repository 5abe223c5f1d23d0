"""Chat templates: rendered as Hugging Face does, refusals become request errors."""

from __future__ import annotations

import pytest
from deepinfer_offline.engine.base import EngineStartError, RequestError
from deepinfer_offline.text.chat import ChatTemplate

SIMPLE = (
    "{% for m in messages %}\n  {{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def user(content: object = "hi") -> dict[str, object]:
    return {"role": "user", "content": content}


def test_blocks_are_trimmed_as_in_transformers() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [user(), {"role": "assistant", "content": "x"}]
    theirs, _ = utils.render_jinja_template(conversations=[messages], chat_template=SIMPLE, add_generation_prompt=True)
    assert ChatTemplate(SIMPLE).render(messages) == theirs[0]


def test_tools_kwargs_and_json_without_html_escapes() -> None:
    template = ChatTemplate(
        "{{ tools | tojson }}{{ thinking }}{{ '<a>' | tojson }}{% break_me %}".replace("{% break_me %}", "")
    )
    assert template.render([user()], tools=[{"name": "é<"}], thinking=True) == '[{"name": "é<"}]True"<a>"'


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render([user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]) == "a\nb"
    with pytest.raises(RequestError, match=r"messages\[0\]\.content has a part of type 'image_url'"):
        template.render([user([{"type": "image_url", "image_url": {}}])])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("hi", "non-empty list"),
        ([3], r"messages\[0\] must be an object"),
        ([user(), {"role": "wizard", "content": "x"}], r"messages\[1\]\.role must be one of system.*got 'wizard'"),
        ([{"content": "x"}], "got None"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing"),
        ([user(3)], "must be a string or a list"),
    ],
)
def test_malformed_messages_are_named(messages: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatTemplate(SIMPLE).render(messages)  # type: ignore[arg-type]


def test_an_assistant_message_may_hold_tool_calls_alone() -> None:
    template = ChatTemplate("{{ messages[0].content | length }}")
    assert template.render([{"role": "assistant", "content": None, "tool_calls": [{}]}]) == "0"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 3 }}",
        "{{ messages.missing.field }}",
        "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_templates_own_refusal_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source).render([user()])


def test_a_broken_template_stops_the_start() -> None:
    with pytest.raises(EngineStartError, match="not valid Jinja"):
        ChatTemplate("{% for %}")
