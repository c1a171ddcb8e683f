"""One server at a time, shared by all tests that want the same flags; tests are ordered by that."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang.test.routed_experts.client import Answer, Client
from sglang.test.routed_experts.compare import Tally
from sglang.test.routed_experts.engines import Engines
from sglang.test.routed_experts.reference import TransformersRouter
from sglang.test.routed_experts.server import Server
from sglang.test.routed_experts.tiny_moe import Shape, make_model


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "served(*flags): the test wants a server with these flags")
    config.addinivalue_line(
        "markers", "last: the test ends its server, so it comes behind the others"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring tests of one server together: starting one takes longer than most tests."""
    items.sort(key=lambda item: (_flags(item) or (), item.get_closest_marker("last") is not None))


def _flags(item: pytest.Item) -> tuple[str, ...] | None:
    marker = item.get_closest_marker("served")
    return marker.args if marker else None


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 layers, 32 experts, top-4."""
    return make_model(tmp_path_factory.mktemp("model"), Shape())


@pytest.fixture(scope="session")
def router(tiny_model: Path) -> TransformersRouter:
    return TransformersRouter(tiny_model)


@pytest.fixture(scope="session")
def engines() -> Engines:
    torch.set_num_threads(1)
    return Engines()


class _OneServer:
    """The server that runs now, if any."""

    def __init__(self, model: Path, logs: Path) -> None:
        self._model = model
        self._logs = logs
        self.in_shm_before: set[str] = set()
        self.server: Server | None = None

    def get(self, flags: tuple[str, ...]) -> Server:
        """A running server with these flags: the one there is, or another in its place."""
        if self.server and self.server.flags == flags and self.server.alive:
            return self.server
        self.stop()
        self.in_shm_before = set(os.listdir("/dev/shm"))
        number = len(list(self._logs.iterdir()))
        self.server = Server(
            self._model, flags, log=self._logs / f"{number}.log", start_timeout=600
        )
        return self.server.__enter__()

    def stop(self) -> None:
        if self.server:
            self.server.stop(patience=0)  # test_lifecycle.py stops one gently
            self.server = None


@pytest.fixture(scope="session")
def one_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_OneServer]:
    servers = _OneServer(tiny_model, tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop()


@pytest.fixture
def server(request: pytest.FixtureRequest, one_server: _OneServer) -> Iterator[Server]:
    """The server of the test's `served` mark. It must still be alive after the test, unless that is marked `last`."""
    flags = _flags(request.node)
    assert flags is not None, "mark the test with @pytest.mark.served(flags)"
    running = one_server.get(flags)
    yield running
    ends = request.node.get_closest_marker("last") is not None
    assert ends or running.alive, "the server died during the test"


@pytest.fixture
def in_shm_before(one_server: _OneServer) -> set[str]:
    """Names in /dev/shm before the server started."""
    return one_server.in_shm_before


@pytest.fixture
def client(server: Server, tiny_model: Path) -> Client:
    return Client(server.url, tiny_model, timeout=300)


@pytest.fixture
def check(router: TransformersRouter):
    """`check(answers)`: each has exactly its rows, and they are what transformers routes."""

    def check(answers: list[Answer]) -> None:
        for answer, expected in zip(answers, router.route([a.tokens for a in answers])):
            assert answer.rows is not None, "rows were asked for"
            assert len(answer.rows) == answer.counted - 1
            tally = Tally()
            tally.add(answer.rows, expected)
            assert tally.mismatches == 0, str(tally)

    return check
