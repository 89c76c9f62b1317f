"""The sockets of `protocol.link`: every frame arrives as it was sent, whatever its size."""

import os

import pytest
import zmq

from protocol.link import COPIED_BYTES, dealer, router

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
