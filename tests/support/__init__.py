"""What several tests use: builders, fakes, servers, services, a browser."""
