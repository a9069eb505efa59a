"""Proxies: none to this machine under any of its names, NO_PROXY as curl reads it, and errors that name the proxy."""

import asyncio
import socket
from pathlib import Path

import pytest
from fake_proxy import proxying
from fake_server import Fake, serving
from typed import not_none

from specdec_cli import proxy
from specdec_cli.errors import RunError, UsageError
from specdec_cli.measure.endpoint.address import parse_address
from specdec_cli.measure.endpoint.endpoint import Endpoint
from specdec_cli.measure.endpoint.refusal import EndpointError
from specdec_cli.measure.workload.dataset import read_dataset
from specdec_cli.proxy import exempt_this_machine, is_this_machine, proxy_of


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


OWN_NAMES = [
    "127.0.0.1", "127.8.9.1", "localhost", "LOCALHOST", "localhost.", "me.localhost", "localhost.localdomain",
    "0.0.0.0", "::", "::1", "::ffff:127.0.0.1", "0", "127.1", "0x7f000001", "2130706433",
    socket.gethostname(), socket.gethostname().upper(),
]  # fmt: skip


@pytest.mark.parametrize("host", OWN_NAMES)
def test_13_this_machine_has_many_names(host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://cache:3128")
    assert is_this_machine(host)
    assert proxy_of(f"http://[{host}]:8000" if ":" in host else f"http://{host}:8000") is None


@pytest.mark.parametrize("host", ["192.0.2.1", "example.test", "2001:db8::1", "224.0.0.1", "a" * 300, "", "no\ud800"])
def test_13_other_machines(host: str) -> None:
    assert not is_this_machine(host)


def test_13_addresses_of_own_interfaces_and_names_of_the_hosts_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def resolve(host, *_, **__):
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.9", 0))]

    (tmp_path / "hosts").write_text("127.0.0.1 localhost  # dev.example.test\n127.0.0.9\tmodels.example.test alias\n")
    monkeypatch.setattr(proxy, "_HOSTS_FILE", tmp_path / "hosts")
    monkeypatch.setattr(socket, "gethostname", lambda: "box.corp.test")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for name in ("models.example.test", "alias", "box", "box.corp.test", "BOX.other.test"):
        assert is_this_machine(name)
    asked.clear()
    assert not is_this_machine("dev.example.test")
    assert asked == [], "the proxy looks up names that are not ours"


def test_13_an_own_address_is_found_without_asking_the_network() -> None:
    import psutil

    found = [a.address for card in psutil.net_if_addrs().values() for a in card if a.family == socket.AF_INET]
    assert found
    assert all(is_this_machine(address) for address in found)


@pytest.mark.parametrize(
    ("no_proxy", "host", "exempt"),
    [
        ("*", "far.test", True), ("far.test", "far.test", True), ("far.test", "a.far.test", True),
        (".far.test", "far.test", True), ("*.far.test", "b.far.test", True), ("far.test", "so-far.test", False),
        ("FAR.test:8000", "far.test", True), ("far.test:9", "far.test", False), ("a.test far.test", "far.test", True),
        ("10.0.0.0/8", "10.9.8.7", True), ("10.0.0.0/8", "11.0.0.1", False), ("10.1.1.1", "10.1.1.1", True),
        ("2001:db8::/32", "2001:db8::5", True), ("2001:db8::5", "2001:db8::5", True),
        ("[2001:db8::5]:8000", "2001:db8::5", True), ("[2001:db8::5]:9", "2001:db8::5", False),
        ("http://far.test", "far.test", True), (",,", "far.test", False), ("]:[,a:b:c/9", "far.test", False),
    ],
)  # fmt: skip
def test_13_no_proxy(monkeypatch: pytest.MonkeyPatch, no_proxy: str, host: str, exempt: bool) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://cache:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    found = proxy_of(f"http://[{host}]:8000" if ":" in host else f"http://{host}:8000")
    assert (found is None) is exempt


@pytest.mark.parametrize(
    ("variables", "url", "words"),
    [
        ({"http_proxy": "cache:3128"}, "http://far.test", "proxy `http://cache:3128` (http_proxy)"),
        ({"HTTP_PROXY": "http://me:hidden@cache/"}, "http://far.test", "proxy `http://cache` (HTTP_PROXY)"),
        ({"HTTPS_PROXY": "http://cache"}, "https://far.test", "proxy `http://cache` (HTTPS_PROXY)"),
        ({"HTTPS_PROXY": "http://cache"}, "http://far.test", "None"),
        ({"ALL_PROXY": "http://cache"}, "http://far.test", "proxy `http://cache` (ALL_PROXY)"),
        ({"ALL_PROXY": "http://a", "HTTP_PROXY": "http://b"}, "http://far.test", "proxy `http://b` (HTTP_PROXY)"),
        ({"HTTP_PROXY": ""}, "http://far.test", "None"),
    ],
)
def test_13_which_proxy_and_who_says_so(monkeypatch: pytest.MonkeyPatch, variables, url: str, words: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(proxy_of(url)) == words
    assert "hidden" not in repr(proxy_of(url))


def models(url: str) -> list[str]:
    async def go():
        async with Endpoint(parse_address(url)) as endpoint:
            return await endpoint.models()

    return asyncio.run(go())


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost", "127.1", socket.gethostname()])
def test_13_a_server_here_is_asked_without_the_proxy(monkeypatch: pytest.MonkeyPatch, host) -> None:
    with proxying() as between, serving(Fake()) as fake:
        for name in ("HTTP_PROXY", "ALL_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, between.url)
        assert models(fake.url.replace("127.0.0.1", host)) == ["fake", "second"]
    assert between.asked == []


def test_13_an_error_through_a_proxy_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with proxying() as between:
        monkeypatch.setenv("HTTP_PROXY", between.url)
        monkeypatch.setenv("HTTPS_PROXY", between.url)
        with pytest.raises(EndpointError) as caught:
            models("http://far.test:8000")
        with pytest.raises(EndpointError) as tunnelled:
            models("https://far.test")
    assert caught.value.message == (
        "`http://far.test:8000/v1/models` refused the request (502): Bad gateway of the proxy; "
        f"asked through the proxy `{between.url}` (HTTP_PROXY)"
    )
    assert "NO_PROXY=far.test" in not_none(caught.value.hint)
    assert "403" in tunnelled.value.message
    assert "(HTTPS_PROXY)" in tunnelled.value.message
    with pytest.raises(EndpointError, match="connection refused; asked through the proxy") as caught:
        models("http://far.test:8000")
    assert caught.value.is_gone
    with pytest.raises(RunError, match=r"asked through the proxy `http://127\.0\.0\.1:\d+` \(HTTPS_PROXY\)"):
        read_dataset("spec-bench")


@pytest.mark.parametrize(
    ("value", "words"),
    [("ftp://cache", "not a proxy's address"), ("http://[", "not a proxy"), ("http://a:b:c", "not a proxy")],
)
def test_13_a_proxy_that_cannot_be_one(monkeypatch: pytest.MonkeyPatch, value: str, words: str) -> None:
    monkeypatch.setenv("ALL_PROXY", value)
    with pytest.raises(UsageError, match=words) as caught:
        models("http://far.test")
    assert "ALL_PROXY" in caught.value.message
    with serving(Fake()) as fake:
        assert models(fake.url)


def test_13_a_socks_proxy_without_its_package_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "socksio", None)
    monkeypatch.setenv("ALL_PROXY", "socks5://cache:1080")
    with pytest.raises(UsageError, match="needs the package `socksio`"):
        models("http://far.test")


def test_13_libraries_that_read_the_environment_leave_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("HTTP_PROXY", "http://cache:3128")
    monkeypatch.setenv("NO_PROXY", "near.test")
    monkeypatch.setenv("no_proxy", "near.test")
    assert exempt_this_machine("http://0.0.0.0:9") is None
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "near.test,0.0.0.0"
    assert "cache:3128" in str(exempt_this_machine("http://far.test"))
    assert os.environ["no_proxy"] == "near.test,0.0.0.0"


def test_13_a_hub_that_is_asked_through_a_proxy_is_named_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    from specdec_cli.lm.files.hub import hub_proxy_words

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.test")
    assert hub_proxy_words() == ""
    monkeypatch.setenv("HTTPS_PROXY", "http://me:hidden@cache:3128")
    assert hub_proxy_words() == "the hub is reached through the proxy `http://cache:3128` (HTTPS_PROXY); "
    monkeypatch.setattr(constants, "ENDPOINT", "https://0.0.0.0:9")
    assert hub_proxy_words() == "", "a mirror on this machine"
