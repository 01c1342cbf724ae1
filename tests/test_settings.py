import socket
from pathlib import Path

import msgspec
import pytest

from ocgpu.errors import ConfigError
from ocgpu.networks import PRIVATE, networks
from ocgpu.settings import VARIABLES, Listen, Settings, describe, load_settings, near_misses
from ocgpu.text import printable


def test_seed_defaults_hold_without_any_setting() -> None:
    settings = load_settings({})

    assert settings == Settings()
    assert settings.listen_ollama == Listen(host="::", port=11435)
    assert settings.listen_comfy == Listen(host="::", port=8189)
    assert settings.listen_admin == Listen(host="127.0.0.1", port=8190)
    assert settings.ollama_url == "http://127.0.0.1:11434"
    assert settings.comfy_url == "http://127.0.0.1:8188"
    assert (settings.unload_timeout, settings.job_timeout) == (60.0, 900.0)
    assert (settings.llm_wait_timeout, settings.warm_model) == (600.0, "")
    assert (settings.log_level, settings.log_format) == ("info", "text")


def test_settings_cannot_be_changed_after_the_start() -> None:
    with pytest.raises(AttributeError):
        load_settings({}).max_queue = 1  # type: ignore[misc]


def test_every_field_has_one_variable_and_every_variable_a_field() -> None:
    assert sorted(variable.field for variable in VARIABLES) == sorted(Settings.__struct_fields__)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("LISTEN_OLLAMA", ":1234", Listen(host="::", port=1234)),
        ("LISTEN_OLLAMA", "0.0.0.0:0", Listen(host="0.0.0.0", port=0)),  # noqa: S104
        ("LISTEN_OLLAMA", "localhost:65535", Listen(host="127.0.0.1", port=65535)),
        ("LISTEN_COMFY", "[::1]:80", Listen(host="::1", port=80)),
        ("LISTEN_COMFY", "off", None),
        ("LISTEN_ADMIN", "[0:0::1]:80", Listen(host="::1", port=80)),
        ("LISTEN_ADMIN", "off", None),
        ("OLLAMA_URL", "https://ollama.lan", "https://ollama.lan"),
        ("OLLAMA_URL", "HTTP://gpu_box:80/", "http://gpu_box:80"),
        ("COMFY_URL", "http://[::1]:9", "http://[::1]:9"),
        ("COMFY_URL", "HTTPS://[::FFFF:10.0.0.5]", "https://[::FFFF:10.0.0.5]"),
        ("OLLAMA_URL", "https://gpu.lan/ollama/", "https://gpu.lan/ollama"),
        ("OLLAMA_URL", "http://h/a/b%20c/d@e:f;g", "http://h/a/b%20c/d@e:f;g"),
        ("OLLAMA_URL", "http://me:p%40ss%2Fw:rd@h:1/x", "http://me:p%40ss%2Fw:rd@h:1/x"),
        ("OLLAMA_URL", "http://token@[::1]:1", "http://token@[::1]:1"),
        ("TRUSTED_PROXIES", "none", ()),
        ("TRUSTED_PROXIES", "Private", PRIVATE),
        ("TRUSTED_PROXIES", "all", networks("0.0.0.0/0,::/0")),
        ("TRUSTED_PROXIES", "10.0.0.5, fd00::/8", networks("10.0.0.5/32,fd00::/8")),
        ("TRUSTED_PROXIES", "203.0.113.7,private", (*PRIVATE, *networks("203.0.113.7"))),
        ("OLLAMA_HOSTS", "ollama.lan,AI.lan", ("ollama.lan", "ai.lan")),
        ("UNLOAD_TIMEOUT", "1m30s", 90.0),
        ("JOB_TIMEOUT", "1.5h", 5400.0),
        ("LLM_WAIT_TIMEOUT", "0", 0.0),
        ("IMAGE_WAIT_TIMEOUT", "500ms", 0.5),
        ("SETTLE_TIMEOUT", " 2s\n", 2.0),
        ("WARM_MODEL", "llama3.2:1b", "llama3.2:1b"),
        ("LEASE", "off", False),
        ("LEASE", "TRUE", True),
        ("GPU_SHARE_WEIGHT", "2.5", 2.5),
        ("GPU_SHARE_WEIGHT", "0.001", 0.001),
        ("IMAGE_BATCH", "0", 0),
        ("MAX_QUEUE", "1", 1),
        ("MAX_WAITING_BYTES", "4096", 4096),
        ("MAX_WAITING_BYTES", "512MiB", 2**29),
        ("JOB_TIMEOUT_ACTION", "interrupt", "interrupt"),
        ("ADMIN_HOSTS", "GPU.lan, other", ("gpu.lan", "other")),
        ("ADMIN_TOKEN", "s3cret", "s3cret"),
        ("OCGPU_GPU_KEY", "GPU-0a.b_c", "GPU-0a.b_c"),
        ("LOG_LEVEL", "WARN", "warning"),
        ("LOG_FORMAT", "json", "json"),
    ],
)
def test_legal_text_becomes_the_value(name: str, text: str, value: object) -> None:
    field = name.removeprefix("OCGPU_").lower()

    assert getattr(load_settings({name: text}), field) == value


ILLEGAL = {
    "LISTEN_OLLAMA LISTEN_COMFY LISTEN_ADMIN": (
        "11435|127.0.0.1|:|:-1|:65536|:1e3|:٣|gpu.lan:80|::1:80|[::1]|[::1:80|[fe80::1%lo]:80"
        "|127.1:80|300.0.0.1:80|127.0.0.1:80/x|http://a:1"
    ),
    "OLLAMA_URL COMFY_URL": (
        "127.0.0.1:11434|ftp://a|http://|http://a:0|http://a:65536|http://a:x|http://a?|http://a/?b"
        "|http://a#|http://a/b#c|http://a b|http://a\nb|http://[::1|http://[x]|http://-a|http://a:"
        "|http://ä.lan|//a|http://a/b c|http://a/\x7f|http://a/ä|http://a/..|http://a/b/../c"
        "|http://a/./b|http://a/%2e%2E/b|http://a/..%2fb|http://a/..%5cb|http://a/%zz|http://a/%4"
        "|http://a/%0d%0aX|http://@a|http://u:p@|http://u:p@ss@a|http://u:p/w@a|http://u%3Av:p@a"
        "|http://u:p%0a@a|http://u:p%@a|http://u:pä@a|http:/u:p@a|u:p@a:1|http://u:p@a?b|https:a"
        "|http://[fe80::1%25lo]|http://a%2eb|http://::1:80|http://[127.0.0.1]|http\u017f://a"
    ),
    "UNLOAD_TIMEOUT JOB_TIMEOUT CONNECT_TIMEOUT": "0|0s|60|-1s|nan|inf|soon|1h-1s",
    "LLM_WAIT_TIMEOUT IMAGE_WAIT_TIMEOUT LEASE_WAIT_TIMEOUT": "60|-1s|nan|infinity|1 s|10min",
    "SETTLE_TIMEOUT WAIT_KEEPALIVE STALL_TIMEOUT DRAIN_TIMEOUT": "60|-1s|nan|infinity|1 s|10min",
    "GPU_SHARE_WEIGHT": "0|-1|nan|inf|-inf|1e400|1e-2|0.0009|1000.1|1_0|two|2:1",
    "IMAGE_BATCH": "-1|1.0|1e3|all|٣|0x8|1_0|9999999999",
    "MAX_QUEUE": "0|-1|1.5|many",
    "MAX_WAITING_BYTES": "0|-1|1GB|1.5GiB|GiB|1 GiB|1e9",
    "LEASE": "2|maybe|enabled",
    "JOB_TIMEOUT_ACTION": "kill|true",
    "LOG_LEVEL": "loud|10",
    "LOG_FORMAT": "xml",
    "WARM_MODEL": "two words|a\x1b[31m|ä",
    "TRUSTED_PROXIES": (
        "yes|10.0.0.1/8|10.0.0.0/33|10.0.0|gpu.lan|10.0.0.1,,10.0.0.2|all,10.0.0.1|none,10.0.0.1"
        "|fe80::1%lo|::ffff:10.0.0.0/104|10.0.0.1 10.0.0.2|[::1]|10.0.0.1:80"
    ),
    "ADMIN_HOSTS OLLAMA_HOSTS": "*|a:80|a,,b|http://a|a b",
    "ADMIN_TOKEN": "two words|tök",
    "OCGPU_GPU_KEY": "a/b|a b|..\n/x|GPU:0|ä|" + 65 * "x",
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (name, text)
        for names, texts in ILLEGAL.items()
        for name in names.split()
        for text in texts.split("|")
    ],
)
def test_illegal_text_is_refused_by_name_value_and_legal_form(name: str, text: str) -> None:
    legal = {variable.name: variable.legal for variable in VARIABLES}[name]
    with pytest.raises(ConfigError) as caught:
        load_settings({name: text})

    shown = "***" if name == "ADMIN_TOKEN" else printable(text)
    if name.endswith("_URL"):
        assert not {"u:", "p@", "v:", "w@"} & {str(caught.value)[at : at + 2] for at in range(200)}
        shown = SHOWN.get(text, shown)
    assert str(caught.value) == f"invalid `{name}`: {shown}; use {legal}"
    assert str(caught.value).isprintable()


# How a refused URL is shown that holds a login, or may hold a key.
SHOWN = {
    "http://a/?b": "http://a/?…",
    "http://a/b#c": "http://a/b?…",
    "http://@a": "http://…@a",
    "http://u:p@": "http://…@",
    "http://u:p@ss@a": "http://…@a",
    "http://u:p/w@a": "http://…@a",
    "http://u%3Av:p@a": "http://…@a",
    "http://u:p%0a@a": "http://…@a",
    "http://u:p%@a": "http://…@a",
    "http://u:pä@a": "http://…@a",
    "http:/u:p@a": "…@a",
    "u:p@a:1": "…@a:1",
    "http://u:p@a?b": "http://…@a?…",
}


def test_no_setting_goes_without_a_table_of_illegal_texts() -> None:
    assert sorted(" ".join(ILLEGAL).split()) == sorted(variable.name for variable in VARIABLES)


def test_every_wrong_setting_is_named_in_one_refusal() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({"JOB_TIMEOUT": "15", "MAX_QUEUE": "0", "LOG_LEVEL": "debug"})

    lines = str(caught.value).splitlines()
    assert [line.split("`")[1] for line in lines] == ["JOB_TIMEOUT", "MAX_QUEUE"]


def test_an_empty_variable_counts_as_not_given_but_an_empty_upstream_turns_its_listener_off() -> (
    None
):
    settings = load_settings({"JOB_TIMEOUT": "", "LISTEN_OLLAMA": " ", "COMFY_URL": ""})

    assert settings.job_timeout == 900.0
    assert settings.listen_ollama == Settings().listen_ollama
    assert (settings.comfy_url, settings.listen_comfy) == ("", None)


def test_flags_win_over_environment_and_environment_over_file(tmp_path: Path) -> None:
    config = tmp_path / "ocgpu.toml"
    config.write_text('job_timeout = "1m"\nIMAGE_BATCH = 3\nmax_queue = 5\nlease = false\n')
    environ = {"IMAGE_BATCH": "4", "MAX_QUEUE": "6", "LEASE": ""}

    settings = load_settings(environ, config=config, overrides={"max_queue": "7"})

    assert settings.job_timeout == 60.0
    assert settings.image_batch == 4
    assert settings.max_queue == 7
    assert settings.lease is False


def test_a_right_flag_hides_a_wrong_variable(tmp_path: Path) -> None:
    config = tmp_path / "ocgpu.toml"
    config.write_text('gpu_key = "from file"\n')

    settings = load_settings({"OCGPU_GPU_KEY": "/"}, config=config, overrides={"gpu_key": "card"})

    assert settings.gpu_key == "card"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("job_timeout = 15", "invalid `JOB_TIMEOUT`: 15; use a duration above 0"),
        ("gpu_share_weight = nan", "invalid `GPU_SHARE_WEIGHT`: nan; use a number"),
        ("gpu_share_weight = inf", "invalid `GPU_SHARE_WEIGHT`: inf; use a number"),
        ("max_queue = true", "invalid `MAX_QUEUE`: true; use a whole number"),
        ("warm_model = {}", "invalid `warm_model`: not one value; use a model name in quotes"),
        ("max_queue = 1\nMAX_QUEUE = 2", "invalid `MAX_QUEUE`: given twice; use it once"),
        ("job_timout = '1m'", "unknown `job_timout`: no setting has this name; use `job_timeout`"),
        ("[serve]\njob_timeout = '1m'", "unknown `serve`: use a name of the settings table"),
        ("ocgpu_dir = '/x'", "unknown `ocgpu_dir`: the library reads it from the environment"),
        ("job_timeout 1m", "use a readable TOML file: "),
        (None, "use a readable TOML file: No such file"),
        (b"log_level = '\xff'", "use a readable TOML file: "),
    ],
)
def test_a_wrong_file_is_refused_with_its_path(
    tmp_path: Path, text: str | bytes | None, part: str
) -> None:
    config = tmp_path / "ocgpu.toml"
    if text is not None:
        config.write_bytes(text if isinstance(text, bytes) else text.encode())

    with pytest.raises(ConfigError) as caught:
        load_settings({}, config=config)

    assert part in str(caught.value)
    assert str(config) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("address", [":8190", "0.0.0.0:8190", "10.0.0.7:8190", "[::]:0"])
def test_an_admin_listener_off_loopback_needs_a_token(address: str) -> None:
    with pytest.raises(ConfigError, match="`ADMIN_TOKEN`"):
        load_settings({"LISTEN_ADMIN": address})

    assert load_settings({"LISTEN_ADMIN": address, "ADMIN_TOKEN": "t"}).admin_token == "t"  # noqa: S105


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"OLLAMA_URL": "", "COMFY_URL": ""}, "OLLAMA_URL"),
        ({"LISTEN_OLLAMA": "off", "LISTEN_COMFY": "off"}, "OLLAMA_URL"),
        ({"LISTEN_COMFY": "127.0.0.1:11435"}, "LISTEN_COMFY"),
        ({"LISTEN_OLLAMA": "127.0.0.1:8190"}, "LISTEN_ADMIN"),
        ({"OLLAMA_URL": "http://localhost:11435"}, "OLLAMA_URL"),
        ({"COMFY_URL": "http://127.0.0.1:11435"}, "COMFY_URL"),
        ({"COMFY_URL": "http://127.0.0.1", "LISTEN_COMFY": ":80"}, "COMFY_URL"),
        ({"COMFY_URL": "https://127.0.0.1/x", "LISTEN_COMFY": ":443"}, "COMFY_URL"),
        ({"OLLAMA_URL": "http://u:p@127.0.0.1:11435/x"}, "OLLAMA_URL"),
        ({"OLLAMA_URL": "http://127.9.9.9:8189"}, "OLLAMA_URL"),
        ({"OLLAMA_URL": "http://127.1:11435"}, "OLLAMA_URL"),
        ({"OLLAMA_URL": "http://[::1]:11435"}, "OLLAMA_URL"),
        ({"OLLAMA_URL": "http://[::ffff:127.0.0.1]:11435"}, "OLLAMA_URL"),
        (
            {"OLLAMA_URL": "http://[::ffff:127.0.0.1]:70", "LISTEN_OLLAMA": "127.0.0.1:70"},
            "OLLAMA_URL",
        ),
        ({"OLLAMA_URL": "http://0.0.0.0:11435"}, "OLLAMA_URL"),
        ({"OLLAMA_URL": "http://[::]:11435"}, "OLLAMA_URL"),
        ({"OLLAMA_URL": "http://0.0.0.0:8190"}, "OLLAMA_URL"),
        ({"OLLAMA_URL": "http://[::1]:7000", "LISTEN_ADMIN": "[::1]:7000"}, "OLLAMA_URL"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    environ: dict[str, str], name: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(environ)

    assert str(caught.value).startswith(f"invalid `{name}`: ")


def test_an_upstream_under_this_machine_s_own_name_is_refused() -> None:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        pytest.skip(f"this machine's name has no address: {name}; add it to /etc/hosts")

    with pytest.raises(ConfigError, match=f"invalid `OLLAMA_URL`: http://{name}:11435; use the"):
        load_settings({"OLLAMA_URL": f"http://{name}:11435"})


@pytest.mark.parametrize(
    ("url", "listen"),
    [
        ("http://127.0.0.1:7000", "127.0.0.2:7000"),
        ("http://[::1]:7000", "127.0.0.1:7000"),
        ("http://[::1]:7000", "0.0.0.0:7000"),
        ("http://203.0.113.7:7000", ":7000"),
        ("http://no.such.name.invalid:7000", ":7000"),
        ("http://127.0.0.1:7001", ":7000"),
    ],
)
def test_an_engine_elsewhere_may_have_a_port_of_ours(url: str, listen: str) -> None:
    settings = load_settings({"OLLAMA_URL": url, "LISTEN_OLLAMA": listen})

    assert settings.ollama_url == url


def test_same_port_on_two_addresses_and_port_0_do_not_contradict() -> None:
    environ = {"LISTEN_OLLAMA": "127.0.0.1:0", "LISTEN_COMFY": "127.0.0.1:0"}
    assert load_settings(environ).listen_comfy == Listen(host="127.0.0.1", port=0)

    environ = {"LISTEN_OLLAMA": "127.0.0.1:7000", "LISTEN_COMFY": "127.0.0.2:7000"}
    assert load_settings(environ).listen_comfy == Listen(host="127.0.0.2", port=7000)


def test_described_settings_read_back_the_same_and_never_show_the_token() -> None:
    environ = {"ADMIN_TOKEN": "s3cret", "JOB_TIMEOUT": "1h1m1.5s", "LISTEN_ADMIN": "off"}
    environ |= {
        "MAX_WAITING_BYTES": "1536KiB",
        "LEASE": "no",
        "ADMIN_HOSTS": "a,b",
        "GPU_SHARE_WEIGHT": "0.5",
        "COMFY_URL": "",
        "TRUSTED_PROXIES": "10.1.0.0/16,private,fd00::1",
        "OLLAMA_HOSTS": "x.lan",
    }
    settings = load_settings(environ)

    described = dict(describe(settings))

    assert described["TRUSTED_PROXIES"] == "private,10.1.0.0/16,fd00::1/128"
    assert described["MAX_WAITING_BYTES"] == "1536KiB"
    assert described["ADMIN_TOKEN"] == "***"  # noqa: S105
    assert "s3cret" not in repr(settings)
    assert load_settings(described | {"ADMIN_TOKEN": "s3cret"}) == settings
    assert msgspec.structs.asdict(settings)["admin_token"] == "s3cret"  # noqa: S105


def test_misspelt_variables_are_named_and_foreign_ones_left_alone() -> None:
    environ = {"LISTEN_OLAMA": "", "LLM_WAIT_TIMOUT": "", "OLLAMA_HOST": "", "JOB_TIMEOUT": "1m"}

    messages = near_misses(environ | {"PATH": "", "OCGPU_DIR": "", "OLLAMA_ORIGINS": ""})

    assert [message.split("`")[1] for message in messages] == ["LISTEN_OLAMA", "LLM_WAIT_TIMOUT"]
    assert messages[0].endswith("use `LISTEN_OLLAMA`")


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("OCGPU_SCHEDULE", "turns", "`turn` or `grid`"),
        ("OCGPU_SHARE", "all", "`machine` or `user`"),
        ("OCGPU_DIR", "relative", "an absolute path"),
    ],
)
def test_the_library_s_own_variables_are_checked_too(name: str, value: str, legal: str) -> None:
    with pytest.raises(ConfigError, match=f"invalid `{name}`: {value}; use {legal}"):
        load_settings({name: value})


def test_a_login_in_a_url_is_shown_nowhere(tmp_path: Path) -> None:
    config = tmp_path / "ocgpu.toml"
    config.write_text('comfy_url = "http://me:s3cret@box/x?"\nollama_url = "http://me:s3cret@box"')
    settings = load_settings({"OLLAMA_URL": "https://me:s3cret@box:1/a@b"})

    assert settings.ollama_url == "https://me:s3cret@box:1/a@b"
    assert dict(describe(settings))["OLLAMA_URL"] == "https://…@box:1/a@b"
    assert "s3cret" not in repr(settings)
    with pytest.raises(ConfigError, match="http://…@box/x") as raised:
        load_settings({}, config=config)
    assert "s3cret" not in str(raised.value)
    assert "me:" not in str(raised.value)


def test_what_is_shown_of_a_login_is_no_login() -> None:
    shown = dict(describe(load_settings({"OLLAMA_URL": "http://me:s3cret@box"})))

    with pytest.raises(ConfigError, match="invalid `OLLAMA_URL`"):
        load_settings(shown)
