"""Chat templates that copy a message's text as it is: what stands around a prompt is rendered once for all prompts."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jinja2 import nodes

# In no template: characters of Unicode's private use.
_HOLE = "\uf8f0headrace\uf8f1"
# Their children decide.
_TRANSPARENT = (
    *(nodes.Template, nodes.If, nodes.TemplateData, nodes.Const, nodes.List, nodes.Tuple),
    *(nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Test),
)
_LOOP = frozenset(("first", "last", "index", "index0", "revindex", "revindex0", "length"))


class ChatFrame(NamedTuple):
    """A rendered conversation but for its last message's text."""

    before: str
    after: str
    strips: bool

    def around(self, text: str) -> str:
        return f"{self.before}{text.strip() if self.strips else text}{self.after}"

    @classmethod
    def of(
        cls,
        template: nodes.Template,
        render: Callable[[Sequence[Mapping[str, str]]], str],
        system: str | None,
    ) -> "ChatFrame | None":
        """That of one user's message, after the system's if there is one; None if a text may change what is around it.

        `render` is what the template does. Raises what it does.
        """
        copying = _Copying()
        if not copying.is_plain(template) or len(copying.strips) != 1:
            return None
        opening = [{"role": "system", "content": system}] if system else []
        before, *after = render([*opening, {"role": "user", "content": _HOLE}]).split(_HOLE)
        return cls(before, after[0], copying.strips.pop()) if len(after) == 1 else None


class _Copying:
    """Reads a template: `strips` says of each place where it copies a text whether without the white space around."""

    def __init__(self) -> None:
        self.strips: set[bool] = set()
        self._messages: set[str] = set()

    def is_plain(self, node: nodes.Node, is_output: bool = False) -> bool:
        """Whether nothing but what is copied depends on a text. `is_output`: what this comes to is written out."""
        if isinstance(node, nodes.Output | nodes.Add | nodes.Concat):
            is_output = is_output or isinstance(node, nodes.Output)
            return all(self.is_plain(child, is_output) for child in node.iter_child_nodes())
        if isinstance(node, nodes.Getitem | nodes.Getattr):
            return self._is_plain_look(node) or (is_output and self._is_copy(node, strips=False))
        if isinstance(node, nodes.Filter):
            bare = node.name == "trim" and not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)
            return is_output and bare and self._is_copy(node.node, strips=True)
        if isinstance(node, nodes.For):
            return self._is_plain_loop(node)
        if isinstance(node, nodes.Name):
            return node.name not in ("messages", "loop", *self._messages)
        if isinstance(node, nodes.Call):
            raises = isinstance(node.node, nodes.Name) and node.node.name == "raise_exception"
            return raises and all(map(self.is_plain, node.iter_child_nodes()))
        return isinstance(node, _TRANSPARENT) and all(map(self.is_plain, node.iter_child_nodes()))

    def _is_plain_loop(self, loop: nodes.For) -> bool:
        over, each = loop.iter, loop.target
        if not (isinstance(over, nodes.Name) and over.name == "messages" and isinstance(each, nodes.Name)):
            return False
        self._messages.add(each.name)
        return not loop.test and not loop.recursive and all(map(self.is_plain, (*loop.body, *loop.else_)))

    def _is_plain_look(self, node: nodes.Getitem | nodes.Getattr) -> bool:
        if isinstance(node.node, nodes.Name) and node.node.name == "loop":
            return _key(node) in _LOOP
        return self._is_message(node.node) and _key(node) == "role"

    def _is_copy(self, node: nodes.Node | None, strips: bool) -> bool:
        if not isinstance(node, nodes.Getitem | nodes.Getattr) or _key(node) != "content":
            return False
        self.strips.add(strips)
        return self._is_message(node.node)

    def _is_message(self, node: nodes.Node) -> bool:
        """Whether it is the loop's, or one by its place."""
        if isinstance(node, nodes.Name):
            return node.name in self._messages
        return (
            isinstance(node, nodes.Getitem)
            and isinstance(node.node, nodes.Name)
            and node.node.name == "messages"
            and isinstance(_key(node), int)
        )


def _key(node: nodes.Getitem | nodes.Getattr) -> object:
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node.arg, nodes.Const) else None
