# SPDX-License-Identifier: MIT OR Apache-2.0
"""A service on loopback that pretends to be Modal's, for Modal's own client.

It keeps the files that are uploaded, and builds no images. A container is a process on this
computer that runs the function of the app. Its tunnels end TLS, as Modal's do.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import itertools
import multiprocessing
import os
import select
import signal
import socket
import ssl
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import grpclib.server
from aiohttp import web
from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from modal_proto import api_pb2
from modal_proto.api_grpc import ModalClientBase

__all__ = ["ModalService", "Tunnel"]

_Result = api_pb2.GenericResult
_Message = TypeVar("_Message")
#: The token that the service accepts.
_TOKEN = {"x-modal-token-id": "ak-test", "x-modal-token-secret": "as-test"}
#: The version of Modal's images, which the client must know.
_BUILDER = "2025.06"
#: The longest time that a question about a call may wait, in seconds. The client asks again.
_POLL = 0.1


class Tunnel:
    """Forwards TLS connections to a port of this computer. Ends with the ``with`` block.

    Attributes:
        address: Its host and its port.
    """

    def __init__(self, certificates: Mapping[str, Path], port: int) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates["cert"], certificates["key"])
        self._port, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            client = stack.enter_context(self._context.wrap_socket(plain, server_side=True))
            server = stack.enter_context(socket.create_connection(("127.0.0.1", self._port)))
            ends: dict[socket.socket, socket.socket] = {client: server, server: client}
            while True:
                ready = [client] if client.pending() else select.select(list(ends), [], [])[0]
                for end in ready:
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    ends[end].sendall(data)

    def close(self) -> None:
        """Accepts no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def __enter__(self) -> Tunnel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class _Call:
    """A call of a function, and the container that runs it."""

    app: str
    result: api_pb2.GenericResult | None = None
    process: BaseProcess | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


class ModalService:
    """A service that runs until the end of the ``with`` block.

    Args:
        directory: Where the output of containers is written.
        certificates: The files of the certificate and of the key of tunnels.

    Attributes:
        requests: The requests of all clients and containers, in their order.
        files: The contents of the uploaded files, by their SHA-256.
        refusals: The errors of calls that fail, by the name of the call.
        build_output: What the builds of images print before they fail, or ``None``: they succeed.
        builds_end: Whether the builds of images end.
        has_capacity: Whether containers start.
        port: The port on which the server of a container listens.
        apps: The apps whose client is connected.
    """

    def __init__(self, directory: Path, certificates: Mapping[str, Path]) -> None:
        self.requests: list[Any] = []
        self.files: dict[str, bytes] = {}
        self.refusals: dict[str, tuple[Status, str]] = {}
        self.build_output: list[str] | None = None
        self.builds_end = self.has_capacity = True
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.apps: set[str] = set()
        self._directory, self._certificates = directory, certificates
        self._numbers = itertools.count(1)
        self._calls: dict[str, _Call] = {}
        self._functions: dict[str, tuple[str, api_pb2.Function]] = {}
        self._images: dict[bytes, str] = {}
        self._queues: dict[str, asyncio.Queue[bytes]] = {}
        self._tunnels: dict[int, Tunnel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables with which Modal's client uses the service."""
        return {
            "MODAL_SERVER_URL": f"http://127.0.0.1:{self._grpc_port}",
            "MODAL_TOKEN_ID": _TOKEN["x-modal-token-id"],
            "MODAL_TOKEN_SECRET": _TOKEN["x-modal-token-secret"],
            "MODAL_CONFIG_PATH": str(self._directory / "no-modal.toml"),
        }

    def of(self, kind: type[_Message]) -> list[_Message]:
        """Returns the requests of a type."""
        return [request for request in self.requests if isinstance(request, kind)]

    def processes(self) -> list[int]:
        """Returns the processes of the containers that run."""
        found = [call.process for call in self._calls.values()]
        return [each.pid for each in found if each is not None and each.is_alive() and each.pid]

    def output(self) -> str:
        """Returns what containers have printed."""
        paths = sorted(self._directory.glob("container-*"))
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)

    def __enter__(self) -> ModalService:
        self._thread.start()
        self._wait(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> None:
        service = self

        class Handlers:
            """Answers all calls of Modal's client. ``__mapping__`` gets an attribute for each."""

            def __getattr__(self, name: str) -> Any:
                async def handle(stream: grpclib.server.Stream[Any, Any]) -> None:
                    await service._answer(name, stream)

                return handle

            def __mapping__(self) -> Any:
                return ModalClientBase.__mapping__(self)  # type: ignore[arg-type]

        self._server = grpclib.server.Server([Handlers()])
        # With the protocol, asyncio turns the delays of small packets off.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        self._grpc_port = listener.getsockname()[1]
        await self._server.start(sock=listener)
        uploads = web.Application(client_max_size=1 << 30)
        uploads.router.add_put("/{blob}", self._upload)
        self._uploads = web.AppRunner(uploads)
        await self._uploads.setup()
        site = web.TCPSite(self._uploads, "127.0.0.1", 0)
        await site.start()
        self._uploads_url = f"http://127.0.0.1:{self._uploads.addresses[0][1]}"

    async def _stop(self) -> None:
        for call in self._calls.values():
            await self._end(call, "the service has ended")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10)
        for tunnel in self._tunnels.values():
            tunnel.close()
        self._server.close()
        await self._server.wait_closed()
        await self._uploads.cleanup()

    async def _answer(self, name: str, stream: grpclib.server.Stream[Any, Any]) -> None:
        """Answers a call with the method of this name."""
        request = await stream.recv_message()
        self.requests.append(request)
        sent: Any = stream.metadata
        client = api_pb2.ClientType.Value("CLIENT_TYPE_CLIENT")
        if sent["x-modal-client-type"] == str(client) and not (_TOKEN.items() <= sent.items()):
            raise GRPCError(Status.UNAUTHENTICATED, "Token ID not found")
        if name in self.refusals:
            raise GRPCError(*self.refusals[name])
        method = getattr(self, name, None)
        if method is None:
            raise GRPCError(Status.UNIMPLEMENTED, f"the service of the tests has no {name}")
        await stream.send_message(await method(request))

    def _new(self, prefix: str) -> str:
        return f"{prefix}-{next(self._numbers)}"

    # The methods below have the names of Modal's calls.

    async def EnvironmentGetOrCreate(self, request: Any) -> Any:
        settings = api_pb2.EnvironmentSettings(image_builder_version=_BUILDER)
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    async def AppCreate(self, request: Any) -> Any:
        app = self._new("ap")
        self.apps.add(app)
        return api_pb2.AppCreateResponse(app_id=app)

    async def AppHeartbeat(self, request: Any) -> Any:
        return Empty()

    async def AppPublish(self, request: Any) -> Any:
        return api_pb2.AppPublishResponse()

    async def AppClientDisconnect(self, request: Any) -> Any:
        self.apps.discard(request.app_id)
        for call in self._calls.values():
            if call.app == request.app_id:
                await self._end(call, "the app has ended")
        return Empty()

    async def QueueGetOrCreate(self, request: Any) -> Any:
        name = self._new("qu")
        self._queues[name] = asyncio.Queue()
        metadata = api_pb2.QueueMetadata()
        return api_pb2.QueueGetOrCreateResponse(queue_id=name, metadata=metadata)

    async def QueueHeartbeat(self, request: Any) -> Any:
        return Empty()

    async def QueuePut(self, request: Any) -> Any:
        for value in request.values:
            self._queues[request.queue_id].put_nowait(value)
        return Empty()

    async def QueueGet(self, request: Any) -> Any:
        values = []
        with contextlib.suppress(asyncio.TimeoutError):
            waiting = self._queues[request.queue_id].get()
            values.append(await asyncio.wait_for(waiting, max(0.0, request.timeout)))
        return api_pb2.QueueGetResponse(values=values)

    async def MountBatchedCheckExistence(self, request: Any) -> Any:
        missing = [each for each in request.sha256_hex_hashes if each not in self.files]
        return api_pb2.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=missing)

    async def MountPutFile(self, request: Any) -> Any:
        if request.WhichOneof("data_oneof") == "data":
            self.files[request.sha256_hex] = request.data
        return api_pb2.MountPutFileResponse(exists=request.sha256_hex in self.files)

    async def MountGetOrCreate(self, request: Any) -> Any:
        return api_pb2.MountGetOrCreateResponse(
            mount_id=self._new("mo"), handle_metadata=api_pb2.MountHandleMetadata()
        )

    async def BlobCreate(self, request: Any) -> Any:
        blob = self._new("bl")
        urls = api_pb2.UploadUrlList(items=[f"{self._uploads_url}/{blob}"])
        return api_pb2.BlobCreateResponse(blob_ids=[blob], upload_urls=urls)

    async def _upload(self, request: web.Request) -> web.Response:
        content = await request.read()
        self.files[hashlib.sha256(content).hexdigest()] = content
        digest = hashlib.md5(content)
        sent = request.headers.get("Content-MD5")
        if sent not in (None, base64.b64encode(digest.digest()).decode()):
            raise web.HTTPBadRequest
        return web.Response(headers={"ETag": f'"{digest.hexdigest()}"'})

    async def ImageGetOrCreate(self, request: Any) -> Any:
        image = self._images.setdefault(request.image.SerializeToString(), self._new("im"))
        return api_pb2.ImageGetOrCreateResponse(image_id=image)

    async def ImageJoinStreaming(self, request: Any) -> Any:
        if not self.builds_end:
            await asyncio.sleep(60)
        metadata = api_pb2.ImageMetadata(image_builder_version=_BUILDER)
        status = _Result.GENERIC_STATUS_SUCCESS
        if self.build_output is not None and request.image_id == [*self._images.values()][-1]:
            status = _Result.GENERIC_STATUS_FAILURE
        return api_pb2.ImageJoinStreamingResponse(result=_Result(status=status), metadata=metadata)

    async def ImageBuildChainGet(self, request: Any) -> Any:
        step = api_pb2.ImageBuildStep(image_id=request.image_id, builder_app_id="ap-builder")
        return api_pb2.ImageBuildChainGetResponse(build_steps=[step])

    async def AppFetchLogs(self, request: Any) -> Any:
        lines = [api_pb2.TaskLogs(data=line) for line in self.build_output or ()]
        batch = api_pb2.TaskLogsBatch(items=lines[-request.limit :])
        return api_pb2.AppFetchLogsResponse(batches=[batch])

    async def FunctionPrecreate(self, request: Any) -> Any:
        return api_pb2.FunctionPrecreateResponse(
            function_id=self._new("fu"), handle_metadata=self._metadata(request.function_name)
        )

    async def FunctionCreate(self, request: Any) -> Any:
        name = request.existing_function_id
        self._functions[name] = request.app_id, request.function
        ranked = api_pb2.FunctionData.RankedFunction(function=request.function)
        return api_pb2.FunctionCreateResponse(
            function_id=name,
            function_data=api_pb2.FunctionData(ranked_functions=[ranked]),
            handle_metadata=self._metadata(request.function.function_name),
        )

    def _metadata(self, name: str) -> api_pb2.FunctionHandleMetadata:
        return api_pb2.FunctionHandleMetadata(
            function_name=name, function_type=api_pb2.Function.FUNCTION_TYPE_FUNCTION
        )

    async def FunctionMap(self, request: Any) -> Any:
        app, function = self._functions[request.function_id]
        (item,) = request.pipelined_inputs
        name, call = self._new("fc"), _Call(app)
        self._calls[name] = call
        if self.has_capacity:
            running = self._run(call, function.function_serialized, item.input.args)
            task = self._loop.create_task(running)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        accepted = api_pb2.FunctionPutInputsResponseItem(input_id=self._new("in"))
        return api_pb2.FunctionMapResponse(function_call_id=name, pipelined_inputs=[accepted])

    async def FunctionGetOutputs(self, request: Any) -> Any:
        call = self._calls[request.function_call_id]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(call.over.wait(), max(0.0, min(request.timeout, _POLL)))
        if call.result is None:
            return api_pb2.FunctionGetOutputsResponse(num_unfinished_inputs=1)
        item = api_pb2.FunctionGetOutputsItem(
            result=call.result, data_format=api_pb2.DATA_FORMAT_PICKLE
        )
        return api_pb2.FunctionGetOutputsResponse(outputs=[item])

    async def FunctionCallCancel(self, request: Any) -> Any:
        assert request.terminate_containers
        await self._end(self._calls[request.function_call_id], "the call was cancelled")
        return Empty()

    async def TunnelStart(self, request: Any) -> Any:
        assert not request.unencrypted
        tunnel = self._tunnels[request.port] = Tunnel(self._certificates, request.port)
        host, port = tunnel.address
        return api_pb2.TunnelStartResponse(host=host, port=port)

    async def TunnelStop(self, request: Any) -> Any:
        self._tunnels.pop(request.port).close()
        return api_pb2.TunnelStopResponse(exists=True)

    async def _run(self, call: _Call, function: bytes, arguments: bytes) -> None:
        """Runs a call in a container, and waits until it ends."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["modal", "tensorstream.remote.providers._modal"])
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_serve,
            args=(theirs, self.variables["MODAL_SERVER_URL"], function, arguments, self.port),
            kwargs={"output": self._directory / self._new("container")},
        )
        await asyncio.to_thread(process.start)
        theirs.close()
        call.process = process
        if call.result is None:
            received = await asyncio.to_thread(_receive, ours)
            self._finish(call, received)
        await asyncio.to_thread(_kill, process)

    async def _end(self, call: _Call, why: str) -> None:
        """Ends a call and its container."""
        self._finish(call, _Result(status=_Result.GENERIC_STATUS_TERMINATED, exception=why))
        if call.process is not None:
            await asyncio.to_thread(_kill, call.process)

    def _finish(self, call: _Call, result: api_pb2.GenericResult) -> None:
        if call.result is None:
            call.result = result
            call.over.set()


def _receive(results: Connection) -> api_pb2.GenericResult:
    """Waits for the result of a container."""
    with results:
        try:
            return _Result.FromString(results.recv_bytes())
        except EOFError:
            return _Result(
                status=_Result.GENERIC_STATUS_FAILURE, exception="the container was killed"
            )


def _kill(process: BaseProcess) -> None:
    """Ends a container with all its processes."""
    process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join(10)


def _serve(
    results: Connection, url: str, function: bytes, arguments: bytes, port: int, *, output: Path
) -> None:
    """Runs a function as Modal's containers do, on the given port. Runs in the container."""
    os.setsid()
    printed = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    for name in [name for name in os.environ if name.startswith("MODAL_")]:
        del os.environ[name]
    os.environ.update({"MODAL_IS_REMOTE": "1", "MODAL_SERVER_URL": url})
    import modal
    from modal._serialization import deserialize, serialize

    client = modal.Client.from_env()
    try:
        args, kwargs = deserialize(arguments, client)
        value = deserialize(function, client)(*args, port=port, **kwargs)
        result = _Result(status=_Result.GENERIC_STATUS_SUCCESS, data=serialize(value))
    except Exception as error:
        result = _Result(
            status=_Result.GENERIC_STATUS_FAILURE, exception=repr(error), data=serialize(error)
        )
    results.send_bytes(result.SerializeToString())
