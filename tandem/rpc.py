"""gRPC settings and statuses shared by all services."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from tandem.errors import InvalidRequest, Overloaded, StartupError, Unavailable
from tandem.tls import ServerFiles

INTERNAL_MESSAGE_BYTES = 64 * 2**20
"""Largest message between gateway, verifier and drafter."""

_COMMON_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def channel_options(max_bytes: int = INTERNAL_MESSAGE_BYTES) -> list[tuple[str, Any]]:
    """Client side: pings every 30 s, so that a dead peer is noticed within 40 s even when idle."""
    return [
        *_COMMON_OPTIONS,
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", max_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name: how long an attempt to connect may take, TLS included. A pause is as short as the one above.
        ("grpc.min_reconnect_backoff_ms", 3_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


def server_options(max_receive_bytes: int = INTERNAL_MESSAGE_BYTES) -> list[tuple[str, Any]]:
    """Server side: accepts pings every 10 s, never shares a port with another process."""
    return [
        *_COMMON_OPTIONS,
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),
    ]


def bind(server: grpc.aio.Server, address: str, key: str, tls: ServerFiles | None = None) -> int:
    """Bind and return the port; StartupError naming the config key if that fails."""
    credentials = tls.credentials() if tls else None
    try:
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if port == 0:
        raise StartupError(f"{key}: cannot listen on {address}: the port is in use or the host is not ours")
    return port


class Health:
    """grpc.health.v1: "" is liveness, each full service name is readiness."""

    def __init__(self, server: grpc.aio.Server, services: list[str], with_reflection: bool):
        self._services = services
        self._plain: grpc.aio.Server | None = None
        self._servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        if with_reflection:
            reflection.enable_server_reflection([*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server)

    async def serve_plainly(self, address: str | None, key: str) -> None:
        """Health alone at an address of its own, without TLS, until `stop`; None serves none. StartupError naming the
        config key if it is taken."""
        if address is None:
            return
        self._plain = grpc.aio.server(options=server_options())
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._plain)
        bind(self._plain, address, key)
        await self._plain.start()

    async def stop(self) -> None:
        """The end of `serve_plainly`."""
        if self._plain:
            await self._plain.stop(None)

    async def set_ready(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        for service in self._services:
            await self._servicer.set(service, status)

    async def drain(self) -> None:
        """NOT_SERVING for good."""
        await self._servicer.enter_graceful_shutdown()


async def check_health(address: str, service: str, timeout: float = 2.0) -> str:
    """The peer's health for `service`: SERVING, NOT_SERVING, SERVICE_UNKNOWN, or the status code of the failure."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout
            )
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


async def wait_for_signal() -> None:
    """Returns on SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


def _status(code: int, message: str, *details: Any) -> Any:
    packed = []
    for detail in details:
        any_detail = any_pb2.Any()
        any_detail.Pack(detail)
        packed.append(any_detail)
    return rpc_status.to_status(status_pb2.Status(code=code, message=message, details=packed))


def _retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(int(seconds * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


def to_status(error: Exception) -> Any:
    """The grpc.Status (with google.rpc details) of a domain error; raises TypeError for others."""
    match error:
        case InvalidRequest():
            bad = error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(field=v.field, description=v.reason)
                    for v in error.violations
                ]
            )
            return _status(code_pb2.INVALID_ARGUMENT, str(error), bad)
        case Overloaded():
            return _status(code_pb2.RESOURCE_EXHAUSTED, str(error), _retry_info(error.retry_after_seconds))
        case Unavailable():
            return _status(code_pb2.UNAVAILABLE, str(error), _retry_info(error.retry_after_seconds))
    raise TypeError(f"not a domain error: {error!r}")


async def abort_with(context: Any, error: Exception) -> NoReturn:
    """End the call with the error's status and details."""
    status = to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")


@contextlib.asynccontextmanager
async def domain_errors(context: Any) -> AsyncIterator[None]:
    """Inside, InvalidRequest, Overloaded and Unavailable end the call with their status."""
    try:
        yield
    except (InvalidRequest, Overloaded, Unavailable) as error:
        await abort_with(context, error)


def field_violations(error: grpc.RpcError) -> list[tuple[str, str]]:
    """(field, reason) pairs of an INVALID_ARGUMENT; empty for other errors."""
    found = []
    for detail in _details(error):
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            found += [(v.field, v.description) for v in bad.field_violations]
    return found


def retry_after_seconds(error: grpc.RpcError) -> float | None:
    """The pause that an error's google.rpc.RetryInfo asks for; None without one."""
    for detail in _details(error):
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            return info.retry_delay.ToNanoseconds() / 1e9
    return None


def _details(error: grpc.RpcError) -> list[any_pb2.Any]:
    status = rpc_status.from_call(error) if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None
    return list(status.details) if status else []
