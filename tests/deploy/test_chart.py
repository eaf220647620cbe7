"""The Helm chart, rendered by Helm: valid objects, hardened pods, real settings, and bad values refused."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import SECRETS, Rendered, render
from tests.deploy.tools import ROOT
from workers.broker.wakeups import make_celery
from workers.config.settings import Settings, load_settings

EVERYTHING: dict[str, Any] = {
    "image": {"digest": f"sha256:{'0' * 64}"},
    "imagePullSecrets": [{"name": "registry"}],
    "secrets": SECRETS | {"webhookSecret": "whsec_eA==", "archiveUrl": "postgresql://reasoner:x@db/reasoner"},
    "config": "[limits]\njobs = 50\n",
    "env": {"REASONER_OTLP_URL": "http://collector:4318"},
    "models": {"claim": "models"},
    "model": "/models/policy",
    "prm": "none",
    "api": {"replicas": 3, "ingress": {"enabled": True, "host": "r.example", "tlsSecret": "tls", "className": "nginx"}},
    "files": {"accessMode": "ReadWriteMany", "storageClass": "nfs"},
    "autoscaling": {"enabled": True, "prometheus": "http://prometheus:9090"},
    "engine": {"replicas": 2, "gpus": 1, "options": {"REASONER_ENGINE_MAX_RUNNING": 64}, "urls": ["http://vllm:8000"]},
    "monitoring": {"enabled": True, "keySecret": {"name": "prometheus-key"}, "labels": {"release": "prometheus"}},
}
ELSEWHERE: dict[str, Any] = {
    "secrets": {"existing": "ours"},
    "engine": {"enabled": False, "urls": ["http://vllm:8000"]},
    "valkey": {"enabled": False, "address": "redis.example:6379", "tls": True},
    "networkPolicies": {"enabled": False},
    "files": {"claim": "shared"},
}
RELEASES = {"defaults": {}, "everything": EVERYTHING, "elsewhere": ELSEWHERE}


@cache
def release(name: str) -> Rendered:
    return render(**RELEASES[name])


@pytest.fixture(params=RELEASES)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return release(request.param)


def test_every_object_is_valid_for_the_oldest_and_the_newest_kubernetes_and_its_operators(rendered: Rendered) -> None:
    assert (rendered.error, rendered.invalid) == (None, [])
    names = [(one["kind"], one["metadata"]["name"]) for one in rendered.manifests]
    assert len(names) == len(set(names)) >= 8


def test_no_pod_is_root_writes_to_its_image_has_an_account_or_lacks_a_memory_limit(rendered: Rendered) -> None:
    templates = [*rendered.pods(), *((one["metadata"]["name"], one) for one in rendered.of_kind("Pod"))]
    for name, template in templates:
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["securityContext"]["runAsUser"] > 0, name
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"], name
            assert not security["allowPrivilegeEscalation"], name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert container["resources"]["limits"]["memory"], name
            mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
            claims = {claim["metadata"]["name"] for claim in pod_claims(rendered, name)}
            assert mounted <= {volume["name"] for volume in pod.get("volumes", ())} | claims, name


def pod_claims(rendered: Rendered, name: str) -> list[dict[str, Any]]:
    sets = [one for one in rendered.of_kind("StatefulSet") if one["metadata"]["name"] == name]
    return [claim for one in sets for claim in one["spec"].get("volumeClaimTemplates", ())]


def test_every_lasting_pod_has_probes_and_more_time_to_end_than_it_takes(rendered: Rendered) -> None:
    handing_back = make_celery(Settings(redis_url="redis://x")).conf.worker_soft_shutdown_timeout
    for name, template in rendered.pods():
        for container in template["spec"]["containers"]:
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container), name
        assert template["spec"]["terminationGracePeriodSeconds"] >= 30 > 2 * handing_back


def test_probes_of_workers_watch_the_file_that_they_touch(rendered: Rendered) -> None:
    for name, template in rendered.pods():
        if "-worker-" in name:
            (container,) = template["spec"]["containers"]
            file = read_env(container)["REASONER_ALIVE_FILE"]
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert file in container[probe]["exec"]["command"][-1]
            assert file.startswith("/tmp/")


def read_env(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_every_variable_of_ours_is_a_setting_and_no_secret_stands_in_a_pod(rendered: Rendered) -> None:
    settings = {f"REASONER_{name.upper()}" for name in Settings.model_fields}
    for name, template in rendered.pods():
        assert not re.search(r"([kaw])\1{31}|whsec_|postgresql:", json.dumps(template)), name
        for container in template["spec"]["containers"]:
            env = read_env(container)
            assert {variable for variable in env if variable.startswith("REASONER_")} <= settings, name


def test_the_url_of_redis_is_one_that_our_settings_take(rendered: Rendered) -> None:
    for name, template in rendered.pods():
        if "-worker-" in name or name.endswith("-api"):
            (container,) = template["spec"]["containers"]
            env = read_env(container)
            Settings(redis_url=env["REASONER_REDIS_URL"].replace("$(REDIS_PASSWORD)", "x" * 32))
            order = [entry["name"] for entry in container["env"]]  # Kubernetes expands what stands before
            assert order.index("REDIS_PASSWORD") < order.index("REASONER_REDIS_URL")


def test_valkey_has_the_users_of_compose() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["configs"]["users"]["content"]
    expected = re.sub(r"\$\{REASONER_REDIS_(\w+):\?\}", r"$REDIS_\1_PASSWORD", compose)
    (container,) = release("defaults").find("StatefulSet", "reasoner-valkey")["spec"]["template"]["spec"]["containers"]
    users = container["command"][-1].partition("<<END\n")[2].partition("END\n")[0]
    assert users == expected


def test_policies_and_budgets_select_pods_of_the_release(rendered: Rendered) -> None:
    labels = [template["metadata"]["labels"] for _, template in rendered.pods()]

    def count(selector: dict[str, Any]) -> int:
        return sum(selector["matchLabels"].items() <= one.items() for one in labels)

    for one in rendered.of_kind("NetworkPolicy"):
        assert count(one["spec"]["podSelector"]) == 1, one["metadata"]["name"]
        for rule in one["spec"]["ingress"]:
            assert all(count(peer["podSelector"]) == 1 for peer in rule.get("from", ()) if "podSelector" in peer)
    for one in (*rendered.of_kind("PodDisruptionBudget"), *rendered.of_kind("Deployment", "StatefulSet")):
        assert count(one["spec"]["selector"]) == 1, one["metadata"]["name"]
    for one in rendered.of_kind("Service"):
        assert count({"matchLabels": one["spec"]["selector"]}) == 1, one["metadata"]["name"]


def test_only_roles_and_monitoring_reach_an_engine_and_roles_alone_the_store() -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in release("defaults").of_kind("NetworkPolicy")}
    for name, others in (("reasoner-engine", 1), ("reasoner-valkey", 0)):
        (rule,) = policies[name]["ingress"]
        components = [
            peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            for peer in rule["from"]
            if "podSelector" in peer
        ]
        assert components == ["api", "worker-batch", "worker-interactive"]
        assert len(rule["from"]) == len(components) + others
        assert policies[name]["egress"] == []


def test_each_replica_of_an_engine_is_addressed_by_its_own_name() -> None:
    (container,) = release("everything").find("Deployment", "reasoner-api")["spec"]["template"]["spec"]["containers"]
    assert read_env(container)["REASONER_ENGINE_URL"].split(",") == [
        "http://vllm:8000",
        "http://reasoner-engine-0.reasoner-engine:8100",
        "http://reasoner-engine-1.reasoner-engine:8100",
    ]
    engine = release("everything").find("StatefulSet", "reasoner-engine")["spec"]
    assert (engine["serviceName"], engine["replicas"]) == ("reasoner-engine", 2)
    assert engine["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_an_autoscaled_pool_leaves_its_replicas_to_keda() -> None:
    everything = release("everything")
    for scaled in everything.of_kind("ScaledObject"):
        deployment = everything.find("Deployment", scaled["spec"]["scaleTargetRef"]["name"])
        assert "replicas" not in deployment["spec"]
        (trigger,) = scaled["spec"]["triggers"]
        args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        assert args[args.index("--slots") + 1] == trigger["metadata"]["threshold"]
    assert len(everything.of_kind("ScaledObject")) == 2


def test_the_rules_and_dashboards_are_those_of_deploy() -> None:
    everything = release("everything")
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text())
    assert everything.find("PrometheusRule", "reasoner")["spec"] == rules
    for board in ("service", "engines"):
        (text,) = everything.find("ConfigMap", f"reasoner-dashboard-{board}")["data"].values()
        assert text == (ROOT / "deploy" / "grafana" / f"{board}.json").read_text()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"secrets": {}}, "secrets.apiKeys is empty: set it to the output of 'openssl rand -hex 32'"),
        ({"secrets": SECRETS | {"redisApiPassword": "p@ssword/of:a-person"}}, "redisApiPassword"),
        ({"secrets": SECRETS | {"archiveUrl": "sqlite:////tmp/x"}}, "archiveUrl"),
        ({"replicas": 3}, "replicas"),
        ({"api": {"replicas": 2}}, "set files.accessMode to ReadWriteMany, or files.claim"),
        ({"api": {"replicas": 0}}, "replicas"),
        ({"api": {"ingress": {"enabled": True}}}, "api.ingress.host is empty"),
        ({"workers": {"batch": {"queues": ["slow"]}}}, "queues"),
        (
            {"workers": {"Interactive": {"queues": ["batch"], "slots": 1, "replicas": 1, "maxReplicas": 1}}},
            "Interactive",
        ),
        ({"workers": {"third": {"queues": ["batch"]}}}, "slots"),
        ({"workerDefaults": {"terminationGracePeriodSeconds": 5}}, "terminationGracePeriodSeconds"),
        ({"engine": {"enabled": False}}, "name the engines elsewhere in engine.urls"),
        ({"engine": {"gpus": "one"}}, "gpus"),
        ({"engine": {"options": {"MAX_RUNNING": 3}}}, "MAX_RUNNING"),
        ({"engine": {"resources": {"limits": {"memory": "8 GB"}}}}, "memory"),
        ({"valkey": {"enabled": False}}, "give the address of another one in valkey.address"),
        ({"valkey": {"enabled": False, "address": "redis://redis:6379"}}, "address"),
        ({"env": {"REASONER_API_KEYS": "k" * 32}}, "REASONER_API_KEYS"),
        ({"autoscaling": {"enabled": True}}, "autoscaling.prometheus is empty"),
        ({"monitoring": {"enabled": True}}, "monitoring.keySecret.name is empty"),
    ],
)
def test_a_bad_value_is_refused_by_its_name(values: dict[str, Any], message: str) -> None:
    error = render(**values).error
    assert error is not None
    assert message in error


PAGE = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()


@pytest.mark.parametrize("text", re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
def test_the_values_of_the_page_render_and_their_configuration_is_ours(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = yaml.safe_load(text)
    rendered = render(**values)
    assert (rendered.error, rendered.invalid) == (None, [])
    monkeypatch.chdir(tmp_path)
    Path("reasoner.toml").write_text(values.get("config", ""))
    load_settings(model=values.get("model", "policy"), prm=values.get("prm", "none"), engine_url="http://vllm:8000")
