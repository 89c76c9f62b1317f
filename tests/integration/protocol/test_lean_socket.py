"""The sockets of `protocol.sockets` deliver every frame as it was sent, whatever its size."""

import os

import pytest
import zmq

from protocol.sockets import COPIED_BYTES, KEPT_BYTES, dealer, router

WAIT_MS = 5_000


@pytest.mark.parametrize("sizes", [[0], [1, 0, 0], [4, 400, COPIED_BYTES - 1], [4, COPIED_BYTES, 1 << 20, 3]])
def test_frames_arrive_as_they_were_sent_there_and_back(sizes):
    frames = [os.urandom(size) for size in sizes]
    context = zmq.Context()
    server, client = router(context), dealer(context, "a")
    try:
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send_multipart(frames, zmq.DONTWAIT)
        assert server.poll(WAIT_MS)
        assert server.recv_multipart(zmq.DONTWAIT) == [b"a", *frames]
        server.send_multipart([b"a", *frames])
        assert client.poll(WAIT_MS)
        assert client.recv_multipart() == frames
        with pytest.raises(zmq.Again):
            client.recv_multipart(zmq.DONTWAIT)
    finally:
        context.destroy(linger=0)


def test_a_large_body_is_kept_where_it_came_and_sent_on_as_often_as_wanted():
    frames = [b"OB", b"header", os.urandom(KEPT_BYTES), os.urandom(KEPT_BYTES - 1), os.urandom(COPIED_BYTES)]
    context = zmq.Context()
    server, client = router(context), dealer(context, "a")
    try:
        client.connect(f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}")
        client.send_multipart(frames)
        assert server.poll(WAIT_MS)
        received = server.recv_multipart(zmq.DONTWAIT)
        assert [type(part) for part in received[3:]] == [memoryview, bytes, memoryview]
        for _ in range(2):
            server.send_multipart([b"a", *received[1:]])
            # A slice of a received frame goes out as the slice, not as the whole frame.
            server.send_multipart([b"a", received[5][:7]])
        for _ in range(2):
            assert client.poll(WAIT_MS)
            assert client.recv_multipart() == frames
            assert client.recv_multipart() == [frames[4][:7]]
    finally:
        context.destroy(linger=0)


def test_what_is_large_and_no_body_is_bytes():
    frames = [os.urandom(KEPT_BYTES), os.urandom(KEPT_BYTES)]
    context = zmq.Context()
    server, client = router(context), dealer(context, "a")
    try:
        client.connect(f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}")
        client.send_multipart(frames)
        assert server.poll(WAIT_MS)
        assert [type(part) for part in server.recv_multipart()] == [bytes] * 3
    finally:
        context.destroy(linger=0)
