"""What processes tell those that they start, and the health that depends on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.server.client import ServerClient
from nemo_gym.server.worker_env import TemplateEnv, WorkerEnv, mark_forked_worker, take_parent_pipe

LEFT = WorkerEnv(entrypoint=Path("/app.py"), server_class="__main__:Server", socket_dir=Path("/sockets"))


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


class Server(SimpleResourcesServer):
    config: BaseResourcesServerConfig

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        return BaseVerifyResponse(**body.model_dump(), reward=1.0)


@pytest.fixture
def app() -> FastAPI:
    config = BaseResourcesServerConfig(host="127.0.0.1", port=1, entrypoint="app.py", name="server")
    return Server(config=config, server_client=ServerClient.model_construct()).setup_webserver()


def test_a_process_that_was_not_forked_as_a_worker_is_none_though_it_inherits_the_variables() -> None:
    LEFT.write()
    assert WorkerEnv.read() is None


def test_a_forked_worker_reads_what_its_main_process_left_and_which_pipe_to_watch() -> None:
    LEFT.write()
    mark_forked_worker(7)
    assert WorkerEnv.read() == LEFT
    assert take_parent_pipe() == 7
    assert take_parent_pipe() is None


def test_a_worker_that_replaces_another_waits_for_none() -> None:
    LEFT.write()
    mark_forked_worker(7)
    WorkerEnv.all_have_served()
    worker = WorkerEnv.read()
    assert worker is not None
    assert not worker.is_starting


def test_what_a_main_process_left_can_be_taken_back() -> None:
    before = dict(os.environ)
    LEFT.write()
    WorkerEnv.clear()
    assert dict(os.environ) == before


def test_a_template_is_taken_once_and_by_its_own_process_only() -> None:
    template = TemplateEnv(process=os.getpid(), control=5, life=6, pid=7)
    template.leave()
    assert TemplateEnv.take() == template
    assert TemplateEnv.take() is None
    TemplateEnv(process=os.getppid(), control=5, life=6, pid=7).leave()
    assert TemplateEnv.take() is None


def test_a_worker_is_healthy_when_its_fellows_serve_too(app: FastAPI) -> None:
    client = TestClient(app)
    assert client.get("/health").status_code == 200
    app.state.waits_for_workers = True
    reply = client.get("/health")
    assert (reply.status_code, reply.json()) == (503, {"status": "starting"})
    app.state.waits_for_workers = False
    assert client.get("/health").json() == {"status": "ok"}
