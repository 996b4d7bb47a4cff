"""The prefix tree: which token blocks have been computed, and which page of each layer group holds them.

::

    root (scope) -- block of tpb tokens -- block of tpb tokens -- ...
                                       `-- partial block (fewer tokens, no children)

A node's key is its tokens themselves, eight bytes each, looked up among its parent's children: two different prefixes
never meet, whatever a hash would say. Nodes know pages; what a page is worth, and when it goes, is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unikv.cached_page import CachedPage
from unikv.errors import SpecError, explain
from unikv.ids import GroupId

TOKEN_BYTES: Final = 8
"""Bytes of one token in a key."""
MAX_SIBLINGS: Final = 32
"""With this many children the longest common prefix is not searched for: it would cost more than it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseScope:
    """Who may share KV: prefixes of different scopes never match.

    Attributes:
        lora_id: the adapter that computed the KV, None for the base model.
        salt: a tenant's secret word, None for everybody's.
    """

    lora_id: int | None = None
    salt: str | None = None


EVERYBODY: Final = ReuseScope()
"""The scope of the base model and of no tenant in particular."""


def token_bytes(tokens: Sequence[int] | np.ndarray) -> bytes:
    """Return tokens as the bytes that keys are cut from, eight per token.

    Raises:
        SpecError: a token is no integer of 64 bits.
    """
    try:
        return _integers(np.asarray(tokens)).tobytes()
    except (TypeError, ValueError, OverflowError) as error:
        got, want = f"{type(tokens).__name__} ({error})", "a sequence of integers of 64 bits"
        raise SpecError(explain("prefix", "tokens", got, want, "pass token ids")) from error


def _integers(tokens: NDArray[Any]) -> NDArray[np.int64]:
    if tokens.size and tokens.dtype.kind not in "iu":
        raise TypeError(f"a {tokens.dtype} array")
    return tokens.astype(np.int64, copy=False)


class PrefixNode:
    """One block of tokens behind one prefix. Only full blocks have children.

    Attributes:
        parent: the block before, None for a root.
        key: the tokens, eight bytes each; empty for a root.
        ordinal: block ordinal, -1 for a root.
        children: full blocks behind this one.
        partials: partial blocks behind this one, none of which covers another.
        pages: one per layer group, None where the group has none.
        attached: a root's line reaches here; a detached node is never found again.
    """

    __slots__ = ("attached", "children", "key", "ordinal", "pages", "parent", "partials")

    def __init__(self, parent: PrefixNode | None, key: bytes, num_groups: int) -> None:
        self.parent = parent
        self.key = key
        self.ordinal: int = -1 if parent is None else parent.ordinal + 1
        self.children: dict[bytes, PrefixNode] = {}
        self.partials: dict[bytes, PrefixNode] = {}
        self.pages: list[CachedPage | None] = [None] * num_groups
        self.attached = True

    @property
    def num_tokens(self) -> int:
        """Tokens of the block."""
        return len(self.key) // TOKEN_BYTES

    def page(self, group_id: GroupId) -> CachedPage | None:
        """Return the page of a layer group."""
        return self.pages[group_id]

    def put(self, page: CachedPage) -> None:
        """Make `page` the node's page of its layer group; the one before must have been taken out."""
        page.node, page.ordinal = self, self.ordinal
        self.pages[page.group_id] = page

    def take(self, group_id: GroupId) -> CachedPage | None:
        """Take the page of a layer group out of the node and return it."""
        page, self.pages[group_id] = self.pages[group_id], None
        if page is not None:
            page.node = None
        return page


class PrefixTreeManager:
    """All roots. Walks, inserts and detaches in time that grows with what is touched."""

    def __init__(self, num_groups: int, tokens_per_block: int) -> None:
        self._num_groups = num_groups
        self._block_bytes = tokens_per_block * TOKEN_BYTES
        self._roots: dict[ReuseScope, PrefixNode] = {}

    def root(self, scope: ReuseScope) -> PrefixNode:
        """Return the root of a scope; it is made when first asked for, and forgotten when it has no children left."""
        root = self._roots.get(scope)
        if root is None:
            root = self._roots[scope] = PrefixNode(None, b"", self._num_groups)
        return root

    def nodes(self) -> Iterator[PrefixNode]:
        """Iterate over all nodes but the roots, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack += [*node.children.values(), *node.partials.values()]

    def walk(self, scope: ReuseScope, tokens: bytes) -> list[PrefixNode]:
        """Return the full blocks along `tokens`, see `token_bytes`, in the tree of `scope`."""
        node, step, found = self._roots.get(scope), self._block_bytes, list[PrefixNode]()
        for start in range(0, len(tokens) - step + 1, step):
            node = None if node is None else node.children.get(tokens[start : start + step])
            if node is None:
                break
            found.append(node)
        return found

    def branches(self, scope: ReuseScope, walked: Sequence[PrefixNode], tokens: bytes) -> list[tuple[PrefixNode, int]]:
        """Return every block behind `walked` that goes on along `tokens` for a while, with how many tokens it does.

        None at all where there are `MAX_SIBLINGS` blocks or more.
        """
        node = walked[-1] if walked else self._roots.get(scope)
        rest = tokens[len(walked) * self._block_bytes :][: self._block_bytes]
        if node is None or not rest or len(node.children) + len(node.partials) >= MAX_SIBLINGS:
            return []
        blocks = [*node.children.values(), *node.partials.values()]
        return [(block, common) for block in blocks if (common := _common_tokens(block.key, rest))]

    def insert(self, parent: PrefixNode, key: bytes) -> tuple[PrefixNode, PrefixNode | None]:
        """Return the full block `key` behind `parent`, and the shorter one it makes superfluous, if there was one."""
        node = parent.children.get(key)
        if node is not None:
            return node, None
        node = parent.children[key] = PrefixNode(parent, key, self._num_groups)
        return node, self._replaced_by(parent, key)

    def insert_partial(self, parent: PrefixNode, key: bytes) -> tuple[PrefixNode, PrefixNode | None]:
        """Return the partial block `key` behind `parent`, and the shorter one it makes superfluous, if there was one.

        Where a block with at least these tokens is there already, it is that one.
        """
        for siblings in (parent.partials, parent.children):
            for other, node in siblings.items():
                if other.startswith(key):
                    return node, None
        replaced = self._replaced_by(parent, key)
        node = parent.partials[key] = PrefixNode(parent, key, self._num_groups)
        return node, replaced

    def detach(self, node: PrefixNode) -> list[PrefixNode]:
        """Take `node` and everything behind it out of the tree; return them all, `node` first."""
        gone = [node]
        for each in gone:  # grows while it is read: deep chains need no deep stack
            gone += [*each.children.values(), *each.partials.values()]
            each.attached = False
        self._cut(node)
        return gone

    def prune(self, node: PrefixNode) -> None:
        """Take out `node` if it has neither pages nor children, and then its parents that were left so."""
        while node.attached and node.parent is not None and not self._is_needed(node):
            node.attached = False
            parent = node.parent
            self._cut(node)
            node = parent

    def _is_needed(self, node: PrefixNode) -> bool:
        return bool(node.children or node.partials or any(page is not None for page in node.pages))

    def _cut(self, node: PrefixNode) -> None:
        parent = node.parent
        assert parent is not None, "a root is never cut off"
        for siblings in (parent.children, parent.partials):
            if siblings.get(node.key) is node:
                del siblings[node.key]
        if parent.parent is None and not parent.children and not parent.partials:
            for scope in [scope for scope, root in self._roots.items() if root is parent]:
                del self._roots[scope]
            parent.attached = False

    def _replaced_by(self, parent: PrefixNode, key: bytes) -> PrefixNode | None:
        """Take out the partial block that `key` covers: there is one at most, since none covers another."""
        for other in parent.partials:
            if key.startswith(other):
                node = parent.partials.pop(other)
                node.attached = False
                return node
        return None


def _common_tokens(one: bytes, other: bytes) -> int:
    """Return how many leading tokens two keys share."""
    size = min(len(one), len(other))
    a = np.frombuffer(one, dtype=np.int64, count=size // TOKEN_BYTES)
    b = np.frombuffer(other, dtype=np.int64, count=size // TOKEN_BYTES)
    differs = np.flatnonzero(a != b)
    return int(differs[0]) if differs.size else size // TOKEN_BYTES
