"""Point-to-point communication in a pipeline: a process group for each channel, and sends that never wait."""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import paddle
import paddle.distributed as dist

from llmsuite.base.spans import span
from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import array_of, tensor_of
from llmsuite.launch import calls
from llmsuite.parallel import edges
from llmsuite.parallel.edges import Channel
from llmsuite.parallel.mesh import Mesh


class P2PChannels:
    """Channels to the neighbours in the pipeline. A send never waits for its receiver, because each channel is
    connected when it is made."""

    def __init__(self, mesh: Mesh, ring: bool):
        """With `ring` the last rank sends to the first, which has another chunk."""
        pipelines = mesh.pipelines()
        # `new_group` is collective over the run: every rank makes every group, in the same order
        groups: dict[Channel, Any] = {}
        for ranks in pipelines:
            for channel in edges.channels(ranks, ring):
                groups[channel] = dist.new_group(sorted((channel.sender, channel.receiver)))
        (own,) = (ranks for ranks in pipelines if mesh.rank in ranks)
        self._outgoing = {forward: edges.outgoing(own, mesh.rank, forward) for forward in (True, False)}
        self._incoming = {forward: edges.incoming(own, mesh.rank, forward) for forward in (True, False)}
        # None beyond the ends of a pipeline: nothing is sent there
        own_channels = (*self._outgoing.values(), *self._incoming.values())
        self._groups: dict[Channel, Any] = {channel: groups.get(channel) for channel in own_channels}
        self._tasks: list[Any] = []
        self._senders: dict[bool, queue.Queue[Callable[[], None]]] = {}
        if any(group is not None and dist.get_backend(group) != "GLOO" for group in self._groups.values()):
            self._open(edges.channels(own, ring))

    def _open(self, order: Sequence[Channel]) -> None:
        """Use each channel once, in an order that all ranks of the pipeline share.

        NCCL and BKCL connect the ends of a channel at its first use, and that send does wait until its receiver is
        ready. In the order of a schedule some ranks would deadlock.
        """
        for channel in order:
            if channel == self._outgoing[channel.forward]:
                self.send(paddle.zeros([1]), channel.forward)
            elif channel == self._incoming[channel.forward]:
                self.receive([1], "float32", channel.forward)

    def send(self, value: Tensor, forward: bool) -> None:
        """Send to the next part (a forward pass), or to the previous one (a backward pass)."""
        channel = self._outgoing[forward]
        group = self._groups[channel]
        peer = channel.receiver
        copy = value.clone()  # the caller may change or free the value before it is sent
        call = calls.recorded("send", copy, group)
        if dist.get_backend(group) != "GLOO":
            self._forget_finished()
            with span("send"):
                self._tasks.append(dist.isend(copy, peer, group))
            call.end()
            return

        # Gloo's send waits for its receiver, and in 1F1B neighbours send to each other at the same time: so a thread
        # for each direction sends, in the order of the calls
        def job() -> None:
            with span("send"):
                group.process_group.send(copy, group.get_group_rank(peer), True).wait()
            call.end()

        if forward not in self._senders:
            self._senders[forward] = queue.Queue()
            threading.Thread(target=_send_all, args=(self._senders[forward],), daemon=True).start()
        self._senders[forward].put(job)

    def send_header(self, header: Sequence[int]) -> None:
        """Send a header of activations, see `edges.HEADER_LENGTH`, to the next part."""
        self.send(tensor_of(header, dtype="int64"), forward=True)

    def receive_header(self) -> Sequence[int]:
        """Receive a header of activations from the previous part."""
        # on the host, as the shape of the activations that follow has to be known there
        header: list[int] = array_of(self.receive([edges.HEADER_LENGTH], "int64", forward=True)).tolist()
        return header

    def _forget_finished(self) -> None:
        """Free the sends that are done. A group of Paddle's keeps a record of each until `wait` is called for one of
        them, which here returns immediately."""
        running = []
        for task in self._tasks:
            if task.is_completed():
                task.wait()
            else:
                running.append(task)
        self._tasks = running

    def receive(self, shape: list[int], dtype: Any, forward: bool) -> Tensor:
        """Receive from the previous part (a forward pass), or from the next one (a backward pass)."""
        channel = self._incoming[forward]
        group = self._groups[channel]
        peer = channel.sender
        value = paddle.empty(shape, dtype=dtype)
        with calls.recorded("receive", value, group):
            # blocking: the next operation computes with the value
            group.process_group.recv(value, group.get_group_rank(peer), True).wait()
        return value


def _send_all(jobs: queue.Queue[Callable[[], None]]) -> None:
    """Run jobs until the process ends, in a thread of its own. A job that fails ends the rank: the main thread is most
    likely waiting for an answer to what was not sent, and nothing else would wake it."""
    try:
        while True:
            jobs.get()()
    except BaseException:
        traceback.print_exc()
        print("a message to a neighbour in the pipeline could not be sent; the run ends", file=sys.stderr, flush=True)
        os._exit(1)
