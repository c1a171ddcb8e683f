"""What the end-to-end tests of routed experts share: a model, a server, requests, a reference."""
