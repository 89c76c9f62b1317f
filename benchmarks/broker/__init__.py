"""Cost of a segment in the broker, compared with sockets that only forward and with Redis Streams."""
