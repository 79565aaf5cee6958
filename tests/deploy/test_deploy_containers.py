"""Dockerfile, compose files and Kubernetes manifests: their linters, and what they say against what
the code does."""

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
    """A linter of the dev extra, beside the interpreter; skipped where a platform has no wheel for
    it."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def clean(name, *arguments, cwd=ROOT):
    result = subprocess.run(
        [tool(name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
    )
    return result.returncode, result.stdout + result.stderr


def manifests():
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}


def pod():
    return manifests()["StatefulSet"]["spec"]["template"]["spec"]


def environment(text):
    """SWARMNODE_* names that a Dockerfile sets, with their values."""
    return {
        name: value.strip("'") for name, value in re.findall(r"(SWARMNODE_\w+)=('[^']*'|\S+)", text)
    }


def test_hadolint_has_nothing_to_say():
    assert clean("hadolint", DOCKERFILE) == (0, "")


def test_hadolint_would_have_something_to_say(tmp_path):
    bad = tmp_path / "Dockerfile"
    bad.write_text(DOCKERFILE.read_text() + "\nRUN cd /tmp && apt-get install curl\n")
    code, said = clean("hadolint", bad)
    assert code != 0
    assert "DL3003" in said


def test_every_accelerator_has_an_index_and_runs_as_nobody():
    text = DOCKERFILE.read_text()
    assert set(re.findall(r"^ +(\w+)\) index=https:", text, re.MULTILINE)) == {
        "cpu",
        "cuda",
        "rocm",
    }
    last = text[text.rindex("\nFROM") :]
    assert re.findall(r"^USER (\S+)$", last, re.MULTILINE) == ["10001:10001"]
    assert "curl" not in text
    assert "HEALTHCHECK" in last


def test_what_the_image_sets_is_configuration():
    set_by_image = environment(DOCKERFILE.read_text())
    config = settings.load(None, set_by_image).config
    assert len(set_by_image) == 3
    assert str(config.node.data_dir) == "/var/lib/swarmnode"
    assert config.network.listen_addrs == ["/ip4/0.0.0.0/tcp/9512"]


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose_files_match_the_schema(path):
    code, said = clean("check-jsonschema", "--builtin-schema", "vendor.compose-spec", path)
    assert (code, said.strip()) == (0, "ok -- validation done")


def test_the_schema_would_notice_an_unknown_key(tmp_path):
    bad = tmp_path / "compose.yaml"
    bad.write_text(COMPOSE[-1].read_text().replace("init: true", "inti: true"))
    assert clean("check-jsonschema", "--builtin-schema", "vendor.compose-spec", bad)[0] != 0


def test_compose_mounts_what_exists_and_gives_the_node_its_time():
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    mounted = [
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service["volumes"]
    ]
    assert all((ROOT / "docker" / source).exists() for source in mounted if source.startswith("."))
    assert {source for source in mounted if not source.startswith(".")} == compose["volumes"].keys()
    node = compose["services"]["node"]
    assert int(node["stop_grace_period"].removesuffix("s")) > DRAIN_SECONDS + 10
    given = {
        name: "" if value.startswith("$") else value for name, value in node["environment"].items()
    }
    assert settings.load(None, given).config.http.host == "0.0.0.0"


def test_nothing_but_peers_reaches_a_composed_node_from_outside():
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == ["9512:9512"]


def test_grafana_is_provisioned_where_the_files_say():
    grafana = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]["grafana"]
    provisioning = ROOT / "deploy" / "grafana" / "provisioning"
    provider = yaml.safe_load((provisioning / "dashboards" / "swarmnode.yml").read_text())[
        "providers"
    ][0]
    assert f"../deploy/grafana/dashboards:{provider['options']['path']}:ro" in grafana["volumes"]
    source = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ][0]
    assert source["url"].strip("${}") in grafana["environment"]


def test_prometheus_takes_the_composed_configuration(tmp_path):
    text = (ROOT / "docker" / "prometheus.yml").read_text()
    config = tmp_path / "prometheus.yml"
    config.write_text(
        text.replace("/etc/prometheus/rules.yml", str(ROOT / "deploy" / "prometheus" / "rules.yml"))
    )
    code, said = clean("promtool", "check", "config", config)
    assert code == 0, said
    jobs = {job["job_name"] for job in yaml.safe_load(text)["scrape_configs"]}
    assert jobs == set(
        re.findall(r'job="(\w+)"', (ROOT / "deploy" / "prometheus" / "rules.yml").read_text())
    )


def test_kubernetes_takes_the_manifests():
    code, said = clean("kubernetes-validate", "--strict", "--quiet", MANIFEST)
    assert (code, said) == (0, "")


def test_kubernetes_would_notice_a_misspelt_field(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text(
        MANIFEST.read_text().replace("terminationGracePeriodSeconds", "terminationGraceSeconds")
    )
    assert clean("kubernetes-validate", "--strict", bad)[0] != 0


def test_a_pod_may_drain_and_is_not_killed_for_loading():
    assert pod()["terminationGracePeriodSeconds"] > DRAIN_SECONDS + 10
    container = pod()["containers"][0]
    assert {
        name: container[name]["httpGet"]["path"]
        for name in ("startupProbe", "livenessProbe", "readinessProbe")
    } == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
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
    config = settings.load(
        None,
        {},
        [
            f"{s}.{k}={v!r}"
            for s, keys in table.items()
            for k, v in keys.items()
            if not isinstance(v, bool)
        ],
    )
    assert config.config.http.host == "0.0.0.0"


def test_pods_are_locked_down():
    spec = pod()
    assert spec["securityContext"]["runAsNonRoot"]
    assert not spec["automountServiceAccountToken"]
    assert not spec["enableServiceLinks"]  # they would set SWARMNODE_* variables
    for container in [*spec["containers"], *spec["initContainers"]]:
        locked = container["securityContext"]
        assert (locked["allowPrivilegeEscalation"], locked["readOnlyRootFilesystem"]) == (
            False,
            True,
        )
        assert locked["capabilities"] == {"drop": ["ALL"]}


def test_yamllint_has_nothing_to_say():
    assert clean("yamllint", "--strict", "-c", ".yamllint.yaml", "deploy", "docker") == (0, "")
