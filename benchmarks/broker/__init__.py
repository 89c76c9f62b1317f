"""What a segment costs the broker, beside sockets that only forward and Redis Streams."""
