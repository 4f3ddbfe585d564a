"""One Redis: how it is reached, what it must be like, and what its errors mean to a caller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvledger_index.errors import InvalidInput, Refused, Unavailable

VERSION_MIN = (7, 0)
"""Redis 7.0 brought functions; Valkey reports a redis_version of 7.2 and up."""

POLICY = "noeviction"


def connect(url: str, *, timeout_seconds: float, connections_max: int) -> Redis:
    """A client for ``redis://``, ``rediss://`` or ``unix://``; nothing is sent yet. Raises InvalidInput.

    It never tries anything again by itself: the fold has its own back-off, the router a deadline and a breaker. RESP2
    and no CLIENT SETINFO, so that a new connection costs no round trip beyond AUTH and SELECT.
    """
    tcp = {} if url.startswith("unix:") else {"socket_keepalive": True}
    try:
        client: Redis = Redis.from_url(
            url,
            protocol=2,
            driver_info=None,
            decode_responses=False,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            health_check_interval=0,
            retry=Retry(NoBackoff(), 0),
            retry_on_error=[],
            max_connections=connections_max,
            **tcp,
        )
        # options in the URL's query show only here; nothing is sent
        client.connection_pool.connection_class(**client.connection_pool.connection_kwargs)
    except (ValueError, TypeError) as error:
        # the URL may hold a password, so it is not repeated
        raise InvalidInput(f"not a Redis URL (redis://host:port/db, rediss://, unix://path): {error}") from error
    return client


def address_of(client: Redis) -> str:
    """Where a client connects to, without user and password."""
    service = getattr(client.connection_pool, "service_name", None)
    if service is not None:
        return f"sentinel service {service}"
    parts: Mapping[str, Any] = client.connection_pool.connection_kwargs
    if "path" in parts:
        return f"unix://{parts['path']}"
    return f"{parts.get('host', 'localhost')}:{parts.get('port', 6379)}/{parts.get('db') or 0}"


@contextmanager
def failures(address: str) -> Iterator[None]:
    """Turn what the client raises into the index's own errors; cancellation passes."""
    try:
        yield
    except (exceptions.RedisError, OSError) as error:
        _raise(error, address)


def _raise(error: Exception, address: str) -> NoReturn:
    raise meaning(error, address) from error


class _Meaning(NamedTuple):
    """Errors of these types, or whose words start so, mean ``to`` a caller."""

    types: tuple[type[Exception], ...]
    prefixes: tuple[str, ...]
    to: type[Refused | Unavailable]
    text: str


_MEANINGS = (
    _Meaning(
        (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError),
        ("NOAUTH", "WRONGPASS", "NOPERM"),
        Refused,
        "denies access ({words}): set user and password in the URL; the user needs INFO, FUNCTION LOAD, FCALL and the "
        "data commands",
    ),
    _Meaning((exceptions.ReadOnlyError,), (), Unavailable, "is a replica now, writes need the primary: {words}"),
    _Meaning(
        (exceptions.OutOfMemoryError,), (), Unavailable, "is full and takes no more blocks, raise maxmemory: {words}"
    ),
    _Meaning((exceptions.BusyLoadingError, exceptions.MaxConnectionsError), (), Unavailable, "is busy: {words}"),
    _Meaning(
        (exceptions.ConnectionError, exceptions.TimeoutError, OSError), (), Unavailable, "does not answer: {words}"
    ),
    _Meaning((exceptions.InvalidResponse,), (), Refused, "does not speak Redis' protocol: {words}"),
    _Meaning(
        (exceptions.MasterDownError, exceptions.TryAgainError),
        ("BUSY", "MISCONF", "NOREPLICAS"),
        Unavailable,
        "refuses for now: {words}",
    ),
    _Meaning(
        (
            exceptions.ClusterDownError,
            exceptions.AskError,
            exceptions.ClusterCrossSlotError,
        ),  # a MovedError is an AskError
        (),
        Refused,
        "is part of a Cluster, which is not supported yet ({words}): use a standalone server or Sentinel",
    ),
    _Meaning(
        (), ("WRONGTYPE",), Refused, "holds another program's key in this namespace ({words}): choose another one"
    ),
    _Meaning((), ("KVSLOTS",), Refused, "has given all 2^32 slots of this namespace: start a new one"),
    _Meaning((), ("unknown command",), Refused, "lacks a command ({words}): Redis >= 7.0 or Valkey is needed"),
    _Meaning((Exception,), (), Refused, "answers: {words}"),
)
"""In order; the first that fits counts."""


def meaning(error: Exception, address: str) -> Refused | Unavailable:
    """What an error of the client or the server means to a caller (pure)."""
    words = str(error)
    kind = next(m for m in _MEANINGS if isinstance(error, m.types) or words.startswith(m.prefixes or "\0"))
    return kind.to(f"Redis at {address} {kind.text.format(words=words)}")


def faults(info: Mapping[str, Any]) -> list[str]:
    """What is wrong with a server that must hold an index, from its INFO; each says what to change (pure)."""
    found: list[str] = []
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < VERSION_MIN:
        found.append(f"version {version} < {'.'.join(map(str, VERSION_MIN))}: upgrade to Redis >= 7.0 or Valkey")
    policy = str(info.get("maxmemory_policy", POLICY))
    if policy != POLICY:
        # volatile-* too: our keys carry no TTL, but then what fills the memory is others' keys, evicted at our cost
        found.append(f"maxmemory-policy {policy} may delete parts of the index: CONFIG SET maxmemory-policy {POLICY}")
    if str(info.get("cluster_enabled", 0)) != "0":
        found.append("Cluster mode is not supported yet: use a standalone server or Sentinel")
    role = str(info.get("role", "master"))
    if role != "master":
        found.append(
            f"it is a {role} of {info.get('master_host')}:{info.get('master_port')}: use the primary's address"
        )
    return found
