"""Which ranks exist and what the operator says of their models: the replicas file and the models file.

Both are YAML; what is wrong is named with file and line and with what to write instead. Pure but for reading the files.

    replicas:                                  models:
      - id: pod-a                                - model: gemma-3-1b-it
        model: gemma-3-1b-it                       aliases: [gemma]
        rank: 0              # default 0           groups:
        data: tcp://10.0.0.7:5557                    - {group: 0, kind: sliding_window, block_size: 16, window: 512}
        replay: tcp://10.0.0.7:5558                  - {group: 1, kind: full_attention, block_size: 16}
        mode: connect        # or bind
        topic: ""            # a prefix
        metrics: http://10.0.0.7:8000/metrics
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import yaml

from kvledger_bridge.errors import InvalidConfig
from kvledger_bridge.sockets import Endpoints
from kvledger_index.enginehash import SEED_DEFAULT, Algorithm, ExtraForm, Scheme
from kvledger_index.model import GROUP_MAX, KNOWN_KINDS, GroupSpec, ModelEntry
from kvledger_wire.partition import REPLICA_PATTERN

T = TypeVar("T")

RANK_MAX = 65_535
REPLICAS_MAX = 4_096
"""Ranks of one bridge: three sockets each."""

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^:\[\]/;]+):(?P<port>\d{1,5})\Z")
_HTTP = re.compile(
    r"https?://(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[A-Za-z0-9._-]+)(?::(?P<port>\d{1,5}))?/[!-\"$-~]+\Z", re.IGNORECASE
)
_HEX = re.compile(r"(?:[0-9a-f]{2})*\Z")
_FIELD = re.compile(r"at `\$\.(\w+)")
_UNKNOWN = re.compile(r"unknown field `(\w+)`")
_ANY_HOSTS = frozenset({"0.0.0.0", "*", "[::]"})  # noqa: S104 - recognised, not bound


class RankConfig(NamedTuple):
    """One rank to follow."""

    replica: str
    rank: int
    entry: ModelEntry
    endpoints: Endpoints
    metrics: str | None = None
    """The engine's own metrics page, which tells which process it is."""


class _Replica(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    model: str
    data: str
    rank: int = 0
    replay: str | None = None
    mode: Literal["connect", "bind"] = "connect"
    topic: str = ""
    metrics: str | None = None


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """GroupSpec as a mapping, which people can read."""

    group: int | None
    kind: str | None = None
    block_size: int | None = None
    window: int | None = None
    chunk: int | None = None
    eagle: bool = False


class _Scheme(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scheme as a mapping; ``none`` is NONE_HASH in hex where the engine's seed was random and is known."""

    algorithm: Algorithm = "sha256"
    seed: str = SEED_DEFAULT
    extras: ExtraForm | None = None
    paths: dict[str, str] = {}
    none: str = ""


class Node(NamedTuple):
    """A YAML value with the place where it stands; children keep theirs."""

    value: Any
    where: str
    children: Mapping[str | int, Node]

    def at(self, key: str | int) -> str:
        """The place of a child, or of this node where the child is missing."""
        child = self.children.get(key)
        return child.where if child else self.where


def read_config(replicas: Path, models: Path) -> list[RankConfig]:
    """Every rank of the replicas file with its model's entry. Raises InvalidConfig."""
    entries = read_models(models)
    return read_replicas(replicas, entries)


def read_models(path: Path) -> dict[str, ModelEntry]:
    """Model entries by name and alias."""
    entries: dict[str, ModelEntry] = {}
    for node in _items(path, "models"):
        entry = _entry(node)
        for name in (entry.model, *entry.aliases):
            if name in entries:
                raise InvalidConfig(f"{node.at('model')}: the name {name!r} is already that of another model entry")
            entries[name] = entry
    return entries


def checked_entry(content: dict[str, object]) -> ModelEntry:
    """One model entry given as the mapping that a models file would hold; raises InvalidConfig."""
    tree = yaml.compose(yaml.safe_dump(content, sort_keys=False), Loader=yaml.SafeLoader)
    if tree is None:
        raise InvalidConfig("the entry is empty")
    return _entry(_node(tree, Path("entry")))


def read_replicas(path: Path, entries: Mapping[str, ModelEntry]) -> list[RankConfig]:
    """Ranks in file order; identities and addresses are unique."""
    ranks: list[RankConfig] = []
    seen: dict[tuple[str, int], str] = {}
    used: dict[str, str] = {}
    nodes = _items(path, "replicas")
    if len(nodes) > REPLICAS_MAX:
        raise InvalidConfig(f"{path}: {len(nodes)} replicas, one bridge follows at most {REPLICAS_MAX}: use several")
    for node in nodes:
        config = _rank(node, entries)
        name = (config.replica, config.rank)
        if name in seen:
            raise InvalidConfig(
                f"{node.where}: replica {config.replica!r} rank {config.rank} stands already at {seen[name]}; "
                f"give each data-parallel rank its own number"
            )
        seen[name] = node.where
        _own_addresses(node, config.endpoints, used)
        ranks.append(config)
    return ranks


def _rank(node: Node, entries: Mapping[str, ModelEntry]) -> RankConfig:
    item = _convert(node, _Replica)
    if not REPLICA_PATTERN.match(item.id):
        raise InvalidConfig(
            f"{node.at('id')}: replica id {item.id!r} may hold letters, digits and ._:@[]%- only, "
            f"must start with a letter or digit and have at most 253 characters"
        )
    if not 0 <= item.rank <= RANK_MAX:
        raise InvalidConfig(f"{node.at('rank')}: rank {item.rank} is outside 0..{RANK_MAX}")
    entry = entries.get(item.model)
    if entry is None:
        known = ", ".join(sorted(entries)) or "none"
        raise InvalidConfig(
            f"{node.at('model')}: model {item.model!r} is not in the models file (known: {known}); add an entry there"
        )
    _address(node, "data", item.data, bind=item.mode == "bind")
    if item.replay is not None:
        _address(node, "replay", item.replay, bind=False)
    if item.metrics is not None:
        _page(node, item.metrics)
    endpoints = Endpoints(item.data, item.replay, item.mode, item.topic)
    return RankConfig(item.id, item.rank, entry, endpoints, item.metrics)


def _entry(node: Node) -> ModelEntry:
    """One model entry; groups are mappings in the file and rows elsewhere."""
    plain = dict(node.value) if isinstance(node.value, dict) else node.value
    groups: list[GroupSpec] = []
    if isinstance(plain, dict):
        unknown = [key for key in plain if key not in ModelEntry.__struct_fields__]
        if unknown:
            known = ", ".join(ModelEntry.__struct_fields__)
            raise InvalidConfig(f"{node.at(unknown[0])}: unknown key {unknown[0]!r} in a model entry (known: {known})")
        listed = plain.pop("groups", None) or []
        if not isinstance(listed, list):
            raise InvalidConfig(f"{node.at('groups')}: groups must be a list of mappings with a key 'group' each")
        groups = [_group(node.children["groups"].children[i]) for i in range(len(listed))]
        if plain.get("hash_scheme") is not None:
            scheme = _convert(node.children["hash_scheme"], _Scheme)
            if not _HEX.match(scheme.none):
                raise InvalidConfig(f"{node.children['hash_scheme'].at('none')}: none must be NONE_HASH in hex digits")
            paths = tuple(scheme.paths.items())
            plain["hash_scheme"] = Scheme(scheme.algorithm, scheme.seed, scheme.extras, paths, none=scheme.none)
    entry = _convert(Node(plain, node.where, node.children), ModelEntry)
    entry = msgspec.structs.replace(entry, groups=tuple(groups))
    _check_entry(node, entry)
    return entry


def _group(node: Node) -> GroupSpec:
    item = _convert(node, _Group)
    if item.group is not None and not 0 <= item.group <= GROUP_MAX:
        raise InvalidConfig(f"{node.at('group')}: group {item.group} is outside 0..{GROUP_MAX}; null means no number")
    if item.kind is not None and item.kind not in KNOWN_KINDS:
        known = ", ".join(sorted(KNOWN_KINDS))
        raise InvalidConfig(f"{node.at('kind')}: kind {item.kind!r} has no hit rule (known: {known})")
    for name in ("block_size", "window", "chunk"):
        size = getattr(item, name)
        if size is not None and size < 1:
            raise InvalidConfig(f"{node.at(name)}: {name} {size} must be at least 1 token")
    return GroupSpec(item.group, item.kind, item.block_size, item.window, item.chunk, item.eagle)


def _check_entry(node: Node, entry: ModelEntry) -> None:
    if not entry.model:
        raise InvalidConfig(f"{node.at('model')}: the model's name is empty")
    numbers = [group.group for group in entry.groups]
    for i, number in enumerate(numbers):
        if number in numbers[:i]:
            where = node.children["groups"].children[i].where
            raise InvalidConfig(f"{where}: group {number} is listed twice")
    for name in ("hash_block_size", "alignment"):
        size = getattr(entry, name)
        if size is not None and size < 1:
            raise InvalidConfig(f"{node.at(name)}: {name} {size} must be at least 1 token")
    for i, group in enumerate(entry.groups):
        if group.block_size and entry.hash_block_size and group.block_size % entry.hash_block_size:
            where = node.children["groups"].children[i].at("block_size")
            raise InvalidConfig(
                f"{where}: block_size {group.block_size} of group {group.group} is no multiple of hash_block_size "
                f"{entry.hash_block_size}; the engine's hash blocks divide every group's blocks"
            )


def _address(node: Node, key: str, address: str, *, bind: bool) -> None:
    where = node.at(key)
    if address.startswith(("ipc://", "inproc://")):
        return
    match = _TCP.match(address)
    if match is None:
        raise InvalidConfig(
            f"{where}: {key} {address!r} is no address; write tcp://HOST:PORT, tcp://[IPv6]:PORT or ipc://PATH"
        )
    port = int(match["port"])
    if not 1 <= port <= 65535:
        raise InvalidConfig(f"{where}: port {port} of {key} is outside 1..65535")
    if not bind and match["host"] in _ANY_HOSTS:
        raise InvalidConfig(
            f"{where}: {key} {address!r} names no host to connect to. Write the engine's address; if the engine itself "
            f"is given a concrete endpoint, its PUB connects, and the bridge must bind: mode: bind"
        )


def _page(node: Node, url: str) -> None:
    match = _HTTP.match(url)
    if match is None or match["host"] in _ANY_HOSTS:
        raise InvalidConfig(
            f"{node.at('metrics')}: metrics names no page; write http://HOST:PORT/metrics, or https, "
            f"the engine's own, without user or password"
        )
    if match["port"] is not None and not 1 <= int(match["port"]) <= 65535:
        raise InvalidConfig(f"{node.at('metrics')}: port {match['port']} of metrics is outside 1..65535")


def _own_addresses(node: Node, endpoints: Endpoints, used: dict[str, str]) -> None:
    """Data and replay addresses may stand only once: vLLM counts both up by rank, so ranges overlap easily."""
    for key, address in (("data", endpoints.data), ("replay", endpoints.replay)):
        if address is None:
            continue
        if address in used:
            raise InvalidConfig(
                f"{node.at(key)}: {key} {address} is already in use at {used[address]}; vLLM adds the rank to both "
                f"ports, so leave at least as many ports between them as there are ranks"
            )
        used[address] = node.at(key)


# -- YAML with lines


def _items(path: Path, name: str) -> list[Node]:
    """The list under ``name``, the file's only key."""
    root = _load(path)
    if not isinstance(root.value, dict) or not isinstance(root.value.get(name), list):
        raise InvalidConfig(f"{root.where}: the file must be a mapping with the key '{name}:' and a list under it")
    other = [key for key in root.value if key != name]
    if other:
        raise InvalidConfig(f"{root.at(other[0])}: unknown key {other[0]!r}; the only one here is {name!r}")
    if not root.value[name]:
        raise InvalidConfig(f"{root.at(name)}: '{name}:' lists nothing; name at least one")
    return [root.children[name].children[i] for i in range(len(root.value[name]))]


def _load(path: Path) -> Node:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}: cannot be read: {error}") from error
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        if tree is None:
            return Node(None, f"{path}:1", {})
        return _node(tree, path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = mark.line + 1 if mark else 1
        raise InvalidConfig(f"{path}:{line}: not YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise InvalidConfig(f"{path}: not YAML: {error}") from error
    except RecursionError as error:
        raise InvalidConfig(f"{path}: nested too deeply") from error


def _node(tree: yaml.Node, path: Path) -> Node:
    where = f"{path}:{tree.start_mark.line + 1}"
    if isinstance(tree, yaml.MappingNode):
        children: dict[str | int, Node] = {}
        for key, value in tree.value:
            name = str(key.value)
            place = f"{path}:{key.start_mark.line + 1}"
            if name in children:
                raise InvalidConfig(f"{place}: the key {name!r} stands twice")
            child = _node(value, path)
            children[name] = Node(child.value, place, child.children)
        return Node({name: child.value for name, child in children.items()}, where, children)
    if isinstance(tree, yaml.SequenceNode):
        items = [_node(value, path) for value in tree.value]
        return Node([item.value for item in items], where, dict(enumerate(items)))
    return Node(yaml.SafeLoader("").construct_object(tree), where, {})


def _convert(node: Node, kind: type[T]) -> T:
    """A node as a typed value; the place is that of the field which is wrong."""
    try:
        return msgspec.convert(node.value, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        field = _FIELD.search(text)
        unknown = _UNKNOWN.search(text)
        where = node.at(unknown[1]) if unknown else node.at(field[1]) if field else node.where
        known = f" (known: {', '.join(kind.__struct_fields__)})" if unknown else ""  # type: ignore[attr-defined]
        raise InvalidConfig(f"{where}: {text}{known}") from error
