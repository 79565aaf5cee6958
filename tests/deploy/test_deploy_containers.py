"""Dockerfile, compose files and Kubernetes manifests: their linters, and their consistency with the
code."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from swarmnode import settings
from swarmnode.daemon.watchdog import DRAIN_SECONDS, STARTUP_SECONDS

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
COMPOSE = sorted((ROOT / "docker").glob("compose*.yaml"))
MANIFEST = ROOT / "deploy" / "kubernetes" / "swarmnode.yaml"


def tool(name):
    """Return a linter of the dev extra. Skip where the platform has no wheel for it."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def clean(name, *arguments):
    command = [tool(name), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    return result.returncode, result.stdout + result.stderr


def read(path):
    return yaml.safe_load((ROOT / path).read_text())


def services():
    return read("docker/compose.yaml")["services"]


def manifests():
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}


def pod():
    return manifests()["StatefulSet"]["spec"]["template"]["spec"]


def environment(text):
    """Return the SWARMNODE_* names that a Dockerfile sets, with their values."""
    found = re.findall(r"(SWARMNODE_\w+)=('[^']*'|\S+)", text)
    return {name: value.strip("'") for name, value in found}


def test_hadolint_accepts_the_dockerfile():
    assert clean("hadolint", DOCKERFILE) == (0, "")


def test_every_accelerator_has_an_index_and_no_root():
    text = DOCKERFILE.read_text()
    indexes = re.findall(r"^ +(\w+)\) index=https:", text, re.MULTILINE)
    assert set(indexes) == {"cpu", "cuda", "rocm"}
    last = text[text.rindex("\nFROM") :]
    assert re.findall(r"^USER (\S+)$", last, re.MULTILINE) == ["10001:10001"]
    assert "curl" not in text
    assert "HEALTHCHECK" in last


def test_image_sets_only_configuration_variables():
    set_by_image = environment(DOCKERFILE.read_text())
    config = settings.load(None, set_by_image).config
    assert len(set_by_image) == 3
    assert str(config.node.data_dir) == "/var/lib/swarmnode"
    assert config.network.listen_addrs == ["/ip4/0.0.0.0/tcp/9512"]


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose_files_match_the_schema(path):
    code, output = clean("check-jsonschema", "--builtin-schema", "vendor.compose-spec", path)
    assert (code, output.strip()) == (0, "ok -- validation done")


def test_compose_mounts_exist_and_stop_period_suffices():
    compose = read("docker/compose.yaml")
    mounted = [
        re.sub(r"\$\{\w+:-(.*?)\}", r"\1", volume).split(":")[0]
        for service in compose["services"].values()
        for volume in service["volumes"]
    ]
    assert all((ROOT / "docker" / source).exists() for source in mounted if source.startswith("."))
    assert {source for source in mounted if not source.startswith(".")} == compose["volumes"].keys()
    node = compose["services"]["node"]
    assert int(node["stop_grace_period"].removesuffix("s")) > DRAIN_SECONDS + 10
    given = {
        name: "" if text.startswith("$") else text for name, text in node["environment"].items()
    }
    http = settings.load(None, given).config.http
    assert http.host == "0.0.0.0"
    scraped = read("docker/prometheus.yml")["scrape_configs"]
    assert scraped[0]["static_configs"] == [{"targets": [f"node:{http.metrics_address[1]}"]}]


@pytest.mark.parametrize(
    ("setting", "own_code", "code"), [("node.nme=x", 78, 0), ("node.data_dir=/proc/none", 69, 69)]
)
def test_compose_restarts_only_what_a_restart_can_fix(setting, own_code, code):
    node = services()["node"]
    assert node["restart"] == "on-failure"
    run = [*node["command"], "--set", setting]
    inside = [sys.executable, *node["entrypoint"][1:]]
    assert node["entrypoint"][0] == "python"
    for command, expected in (([sys.executable, "-m", "swarmnode"], own_code), (inside, code)):
        done = subprocess.run([*command, *run], capture_output=True, timeout=60, check=False)
        assert done.returncode == expected, done.stderr


def test_compose_exposes_only_the_peer_port():
    ports = [port for service in services().values() for port in service.get("ports", [])]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == ["9512:9512"]


def test_grafana_provisioning_paths_match():
    grafana, provisioning = services()["grafana"], Path("deploy/grafana/provisioning")
    provider = read(provisioning / "dashboards" / "swarmnode.yml")["providers"][0]
    assert f"../deploy/grafana/dashboards:{provider['options']['path']}:ro" in grafana["volumes"]
    source = read(provisioning / "datasources" / "prometheus.yml")["datasources"][0]
    assert source["url"].strip("${}") in grafana["environment"]


def test_rules_name_the_jobs_of_the_compose_configuration():
    """tests/deploy/test_alert_delivery.py runs Prometheus with this configuration."""
    config = read("docker/prometheus.yml")
    rules = (ROOT / "deploy" / "prometheus" / "rules.yml").read_text()
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    assert jobs == set(re.findall(r'job="(\w+)"', rules))


def test_kubernetes_accepts_the_manifests():
    code, output = clean("kubernetes-validate", "--strict", "--quiet", MANIFEST)
    assert (code, output) == (0, "")


def test_pod_may_drain_and_load_slowly():
    assert pod()["terminationGracePeriodSeconds"] > DRAIN_SECONDS + 10
    container = pod()["containers"][0]
    probes = {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    assert {name: container[name]["httpGet"]["path"] for name in probes} == probes
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= STARTUP_SECONDS


def test_the_identity_outlives_the_pod():
    state = manifests()["StatefulSet"]["spec"]
    claims = {claim["metadata"]["name"] for claim in state["volumeClaimTemplates"]}
    container = pod()["containers"][0]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    data_dir = next(e["value"] for e in container["env"] if e["name"] == "SWARMNODE_NODE_DATA_DIR")
    assert any(data_dir.startswith(mounts[claim]) for claim in claims)
    assert f"{data_dir}/identity.key" in pod()["initContainers"][0]["command"][2]


def test_the_config_map_is_configuration():
    table = tomllib.loads(manifests()["ConfigMap"]["data"]["config.toml"])
    rows = [(f"{part}.{key}", value) for part in table for key, value in table[part].items()]
    overrides = [f"{key}={value!r}" for key, value in rows if not isinstance(value, bool)]
    http = settings.load(None, {}, overrides).config.http
    template = manifests()["StatefulSet"]["spec"]["template"]
    assert http.host == "127.0.0.1", "the page shows answers and the log"
    ports = {port["name"]: port["containerPort"] for port in pod()["containers"][0]["ports"]}
    assert ports["metrics"] == http.metrics_address[1]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(ports["metrics"])


def pod_environment(container, pod, invite=None):
    """Return a container's environment as Kubernetes makes it for a pod in the namespace `team`."""
    values = {"metadata.name": pod, "metadata.namespace": "team"}
    made = {}
    for entry in container["env"]:
        source = entry.get("valueFrom", {})
        if "configMapKeyRef" in source:
            assert source["configMapKeyRef"]["optional"]
            if invite is not None:
                made[entry["name"]] = invite
        elif "fieldRef" in source:
            made[entry["name"]] = values[source["fieldRef"]["fieldPath"]]
        else:
            made[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda m: made[m[1]], entry["value"])
    return made


def test_pods_announce_the_names_that_their_service_gives_them():
    state, service = manifests()["StatefulSet"], manifests()["Service"]
    assert state["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    name = f"{state['metadata']['name']}-2"
    given = pod_environment(pod()["containers"][0], name)
    config = settings.load(None, {k: v for k, v in given.items() if "SWARMNODE" in k}).config
    host = f"{name}.{service['metadata']['name']}.team.svc.cluster.local"
    port = next(p["port"] for p in service["spec"]["ports"] if p["name"] == "p2p")
    assert config.network.announce_addrs == [f"/dns4/{host}/tcp/{port}"]
    assert config.node.name == name


@pytest.mark.parametrize(
    ("name", "invite", "starts"),
    [("swarmnode-0", None, True), ("swarmnode-10", None, False), ("swarmnode-1", "/dns4/…", True)],
)
def test_only_the_first_pod_starts_without_an_invite(name, invite, starts):
    (waits,) = [one for one in pod()["initContainers"] if one["name"] == "invite"]
    given = pod_environment(waits, name, invite)
    done = subprocess.run(waits["command"], env=given, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == starts
    assert ("swarmnode-invite" in done.stderr) != starts


def test_pods_are_locked_down():
    spec = pod()
    assert spec["securityContext"]["runAsNonRoot"]
    assert not spec["automountServiceAccountToken"]
    assert not spec["enableServiceLinks"]  # they would set SWARMNODE_* variables
    for container in [*spec["containers"], *spec["initContainers"]]:
        locked = container["securityContext"]
        assert not locked["allowPrivilegeEscalation"]
        assert locked["readOnlyRootFilesystem"]
        assert locked["capabilities"] == {"drop": ["ALL"]}


def test_yamllint_accepts_the_files():
    assert clean("yamllint", "--strict", "-c", ".yamllint.yaml", "deploy", "docker") == (0, "")
