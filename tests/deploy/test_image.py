"""The container image: built from the Dockerfile without a compiler, run and stopped."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
import urllib.request

import pytest

from tests.support.fresh import machine
from tests.support.waiting import free_port

TOOLS = ("buildah", "debootstrap")

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, TOOLS)),
        reason="needs root, " + ", ".join(TOOLS),
    ),
]


class Buildah:
    """Images in a private directory. Their processes are isolated by chroot only."""

    def __init__(self, store):
        self._command = ["buildah", "--root", store / "images", "--runroot", store / "run"]

    def __call__(self, command, *arguments):
        done = subprocess.run(
            [*self._command, command, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout.strip()

    def build(self, context, tag, *options):
        isolation = ["--isolation", "chroot", "--network", "host", "--pull=never"]
        self("build", *isolation, "--format", "docker", "--tag", tag, *options, context)

    def start(self, container, environment, log, *command):
        """Start a process of the container. The first line of `log` is its process id."""
        options = [f"--env={name}={value}" for name, value in environment.items()]
        inside = ["sh", "-c", 'echo $$; exec "$@"', "-", *command]
        return subprocess.Popen(
            [*self._command, "run", "--isolation", "chroot", *options, container, "--", *inside],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.fixture
def buildah(tmp_path):
    run = Buildah(tmp_path)
    yield run
    run("rm", "--all")
    run("rmi", "--all", "--force")


@pytest.fixture
def image(buildah, tmp_path):
    """Return the name of the image, built from a clean clone on a fresh Debian."""
    with machine("bookworm") as fresh:
        (fresh.root / "usr" / "bin" / "python").symlink_to("python3")
        clone = tmp_path / "clone"
        shutil.move(fresh.root / "opt" / "swarmnode", clone)
        (tmp_path / "base").write_text("FROM scratch\nCOPY . /\n")
        base = "localhost/python:3.11-slim-bookworm"
        buildah.build(fresh.root, base, "--file", tmp_path / "base")
        shared = [f"--volume={path}:{path}" for path in fresh.shared]
    buildah.build(clone, "swarmnode", "--file", clone / "docker" / "Dockerfile", *shared)
    return "localhost/swarmnode"


def test_the_image_is_built_and_runs_and_drains(buildah, image, tmp_path):
    port = free_port()
    environment = {
        "SWARMNODE_HTTP_PORT": port,
        "SWARMNODE_NETWORK_LISTEN_ADDRS": f'["/ip4/127.0.0.1/tcp/{free_port()}"]',
    }
    container = buildah("from", "--pull=never", image)
    log = tmp_path / "log"
    with open(log, "wb") as output:
        node = buildah.start(container, environment, output, "swarmnode", "run")
    try:
        await_ready(node, f"http://127.0.0.1:{port}/readyz", log)
        assert b"swarmnode_node_info{" in get(f"http://127.0.0.1:{port}/metrics")
        assert b'"ok":true' in get(f"http://127.0.0.1:{port}/healthz")
        inside = int(log.read_text().split("\n", 1)[0])
        os.kill(inside, signal.SIGTERM)
        assert node.wait(60) == 0
    finally:
        if node.poll() is None:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()


def await_ready(node, url, log, seconds=300):
    """Return when `url` answers. Fail if the node ends first or takes longer."""
    late = time.monotonic() + seconds
    while time.monotonic() < late:
        with contextlib.suppress(OSError):
            get(url)
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.wait(timeout=1)
            break
    pytest.fail(log.read_text()[-3000:])


def get(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read()
