"""The base of all wire models: unknown fields are kept, and the JSON spelling of access works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict


class WireModel(BaseModel):
    """A JSON object of the API: known fields are typed, unknown ones are kept.

    Parts can be read like the dicts they came from (`part["text"]`, `part.get("text")`) or by attribute, so
    code need not know whether it holds a parsed item or plain JSON.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    always_sent: ClassVar[tuple[str, ...]] = ()
    """Fields with defaults that the API requires, so `model_dump(exclude_unset=True)` must not drop them."""

    def model_post_init(self, context: Any, /) -> None:
        """Count the fields in `always_sent` as set."""
        if self.always_sent:
            self.__pydantic_fields_set__.update(self.always_sent)

    def __getitem__(self, key: str) -> Any:
        if key in self:
            return getattr(self, key)
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return key in type(self).__pydantic_fields__ or key in (self.model_extra or ())

    def get(self, key: str, default: Any = None) -> Any:
        """Return the field `key`, or `default` where the object has none."""
        return getattr(self, key) if key in self else default


def as_plain(value: Any) -> Any:
    """Return a foreign pydantic model (such as the `openai` package's) as a dict, anything else as it is."""
    if type(value) is not dict and isinstance(value, BaseModel) and not isinstance(value, WireModel):
        return value.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return value


def as_dict(value: Any) -> Any:
    """Return any pydantic model as a plain dict of the fields it was given, and anything else as it is."""
    if type(value) is not dict and isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return value


def null_means(default: Callable[[], Any]) -> BeforeValidator:
    """Return a validator that reads null as `default()`, for fields of which clients send null for "not given"."""
    return BeforeValidator(lambda value: default() if value is None else value)


def _refuse_streaming(value: Any) -> Any:
    if value not in (None, False):
        raise ValueError("replies are not streamed here: leave `stream` out, or set it to false")
    return value


NoStreaming: TypeAlias = Annotated[Literal[False] | None, BeforeValidator(_refuse_streaming)]
"""The request field `stream`."""
