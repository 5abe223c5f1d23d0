"""The V4.1 message encoding, and its refusals."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from deepinfer_offline.engine.base import RequestError
from deepinfer_offline.models.deepsig_v41.chat import V41ChatEncoding

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def encoding() -> V41ChatEncoding:
    pytest.importorskip("deepseek_recipe")
    return V41ChatEncoding()


def test_turns_and_thinking(encoding: V41ChatEncoding) -> None:
    """The special tokens and their order are the released model's; thinking is on unless it is switched off."""
    text = encoding.render(HELLO)
    assert text.startswith("<｜begin▁of▁sentence｜><｜System｜>")
    assert text.endswith("Be brief.<｜User｜>Hello<｜Assistant｜><think>")
    plain = encoding.render(HELLO, thinking=False)
    assert plain == "<｜begin▁of▁sentence｜><｜System｜>Be brief.<｜User｜>Hello<｜Assistant｜></think>"
    assert encoding.render(HELLO, enable_thinking=False) == plain


def test_reasoning_effort_changes_the_prompt(encoding: V41ChatEncoding) -> None:
    efforts = {effort: encoding.render(HELLO, reasoning_effort=effort) for effort in ("low", "high", "max")}
    assert len(set(efforts.values())) == 3
    assert all("Reasoning Effort" in text for text in efforts.values())


def test_tools_and_their_results(encoding: V41ChatEncoding) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    text = encoding.render(
        [
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ],
        tools=[tool],
    )
    assert '"name":"weather"' in text.replace(" ", "")
    assert "Bonn" in text
    assert "<tool_result>sunny</tool_result>" in text


def test_last_assistant_message_is_continued(encoding: V41ChatEncoding) -> None:
    text = encoding.render([*HELLO, {"role": "assistant", "content": "Hi th"}], add_generation_prompt=False)
    assert text.endswith("Hi th")
    with pytest.raises(RequestError, match="must then be the assistant's"):
        encoding.render(HELLO, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("messages", "options", "reason"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], {}, "text only, no images"),
        ([{"role": "wizard", "content": "x"}], {}, "unknown variant `wizard`"),
        (HELLO, {"reasoning_effort": "enormous"}, "enormous"),
        (HELLO, {"colour": "red"}, "has no option colour"),
    ],
)
def test_refusals(encoding: V41ChatEncoding, messages: Any, options: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        encoding.render(messages, **options)


def test_missing_package_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    with pytest.raises(RequestError, match="pip install deepseek-recipe"):
        V41ChatEncoding()
