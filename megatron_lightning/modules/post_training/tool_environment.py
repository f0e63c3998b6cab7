"""Tools of a model as an environment: functions, or methods of an environment of TRL."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_lightning.data.chat.conversations import text_messages
from megatron_lightning.data.chat.row_values import ASSISTANT
from megatron_lightning.data.rollouts.environments import Message, Turn, imported
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.serving.tool_calls import ToolCall, parse_calls
from megatron_lightning.optional import require

_NO_TOOLS = ("reset", "get_reward", "close")


class ToolEnvironment:
    """Tools that an answer may call, as for ``GRPOTrainer`` of TRL.

    Calls are JSON between ``<tool_call>`` and ``</tool_call>``, or an answer that is JSON. Results
    are messages of the role ``tool``; an exception is the result ``{"error": ...}``. An answer
    without a call ends the conversation.

    Args:
        tools: Functions, ordinary or asynchronous, with types and docstrings of their arguments
            (Google's style), or class paths.
        environment: Class of TRL's ``environment_factory``, or its class path: ``reset(**row)``
            returns text to append to the last message of the prompt, or None; further public
            methods are tools; ``get_reward()`` is the reward, if there is one.

    Raises:
        ConfigError: If there is no tool, or its arguments are not described.
    """

    def __init__(self, tools: Sequence[Any] = (), environment: Any = None) -> None:
        self._inner = None if environment is None else imported(environment, "environment")()
        functions = [imported(one, "tool") for one in tools]
        if self._inner is not None:
            functions += [
                getattr(self._inner, name)
                for name, _ in inspect.getmembers(type(self._inner), inspect.isfunction)
                if not name.startswith("_") and name not in _NO_TOOLS
            ]
        if not functions:
            raise ConfigError(
                "ToolEnvironment has no tools. Set tools to functions or their class paths, or "
                "environment to a class whose public methods are tools."
            )
        self._functions: dict[str, Callable[..., Any]] = {f.__name__: f for f in functions}
        self.tools = [_schema(function) for function in functions]
        """Schemas of the tools, for the chat template."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message] | None:
        """Return the first messages. None: those of the row."""
        if self._inner is None:
            return None
        observation = await _result(self._inner.reset(**row))
        if observation is None:
            return None
        messages = row.get("prompt") or [{"role": "user", "content": ""}]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        [last] = text_messages(Row("the prompt", {}), messages[-1:])  # its parts are joined
        return [*messages[:-1], {**last, "content": f"{last['content']}{observation}"}]

    async def step(self, messages: Sequence[Message], answer: str) -> Turn:
        """Call the tools of an answer."""
        content, calls = parse_calls(answer, self._functions)
        if not calls:
            return Turn(done=True)
        results = [
            {"role": "tool", "name": call.name, "content": await self._called(call)}
            for call in calls
        ]
        return Turn(results, answer={"role": ASSISTANT, "content": content, "tool_calls": [
            {"type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in calls
        ]})  # fmt: skip

    async def _called(self, call: ToolCall) -> str:
        try:
            result = await _result(self._functions[call.name](**json.loads(call.arguments)))
        except Exception as error:
            result = {"error": str(error)}
        return result if isinstance(result, str) else json.dumps(result, default=str)

    async def end(self) -> float | None:
        """Return the reward of TRL's environment, if it has one."""
        get_reward = getattr(self._inner, "get_reward", None)
        return None if get_reward is None else await _result(get_reward())

    async def close(self) -> None:
        """Close TRL's environment, if it can be closed."""
        close = getattr(self._inner, "close", None)
        if close is not None:
            await _result(close())


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _schema(function: Callable[..., Any]) -> Any:
    require("transformers", "tools")
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:  # of several classes, all for missing descriptions
        raise ConfigError(
            f"the tool {function.__name__} cannot be described for the model ({error}). Write the "
            "types of its arguments, and their descriptions in a docstring with Args:."
        ) from error
