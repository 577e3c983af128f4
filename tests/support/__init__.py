"""What several tests stand on: builders, fakes, servers, a browser."""
