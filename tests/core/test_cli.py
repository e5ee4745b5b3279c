"""The trueup command: what it prints, what it imports, and how it ends."""
import json
import subprocess
import sys
import textwrap
from importlib.metadata import EntryPoint

import pytest

from trueup.core import cli, doctor

# A distribution that brings a subcommand, as trueup-models and trueup-server do.
PLUGIN = """
    import torch  # a command may be slow to import; the help must not be
    from trueup.core import ContractError
    from trueup.core.ops.contract import SIZE

    HELP = "fail in a chosen way"

    def add_arguments(parser):
        parser.add_argument("how", choices=["not", "value", "contract", "bug", "interrupt", "lines"])

    def run(args):
        if args.how == "value":
            raise ValueError("page size 100 is not a multiple of 16; use 128")
        if args.how == "contract":
            raise ContractError("npu_x", "query", "[3]", "4 axes", SIZE, "a page", "SB-01")
        if args.how == "bug":
            raise KeyError("bug")
        if args.how == "interrupt":
            raise KeyboardInterrupt
        if args.how == "lines":
            for i in range(100_000):
                print(i)
        return 0
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    (tmp_path / "trueup_plugin").mkdir()
    (tmp_path / "trueup_plugin/command.py").write_text(textwrap.dedent(PLUGIN))
    info = tmp_path / "trueup_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trueup-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trueup.commands]\nmisbehave = trueup_plugin.command\ngone = trueup_gone\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield
    for name in ("trueup_plugin", "trueup_plugin.command"):
        sys.modules.pop(name, None)


def test_help_names_every_command_and_imports_none(plugin):
    code = (
        "import sys; from trueup.core import cli\n"
        "try: cli.main(['--help'])\n"
        "finally: assert 'torch' not in sys.modules and 'trueup_plugin' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert doctor.HELP in done.stdout
    assert "fail in a chosen way" in done.stdout


def test_help_of_a_command(plugin, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["misbehave", "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "usage: trueup misbehave" in out and "fail in a chosen way" in out


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("trueup 0.")


def test_success(plugin, capsys):
    assert cli.main(["misbehave", "not"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_users_mistake_is_one_line(plugin, capsys):
    assert cli.main(["misbehave", "value"]) == 2
    assert capsys.readouterr() == ("", "trueup: page size 100 is not a multiple of 16; use 128\n")


def test_a_contract_error_is_printed_whole(plugin, capsys):
    assert cli.main(["misbehave", "contract"]) == 2
    assert capsys.readouterr().err == textwrap.dedent("""\
        trueup: npu_x: query is [3]
          expected  4 axes
          rule      SIZE, from a page
          see       SB-01 in the bug gallery
    """)


def test_a_bug_keeps_its_traceback(plugin):
    with pytest.raises(KeyError):
        cli.main(["misbehave", "bug"])


@pytest.mark.parametrize("argv", [[], ["nope"], ["misbehave"], ["misbehave", "nope"], ["--nope"]])
def test_wrong_arguments_exit_with_2(plugin, argv, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2
    assert "usage: trueup" in capsys.readouterr().err


def test_a_command_that_is_not_installed_is_named(plugin, capsys):
    assert cli.main(["gone"]) == 2
    assert capsys.readouterr().err == (
        "trueup: gone: No module named 'trueup_gone'; is everything that trueup-plugin needs installed?\n"
    )


def test_interrupt(plugin, capsys):
    assert cli.main(["misbehave", "interrupt"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_closed_pipe_is_quiet(plugin):
    process = subprocess.Popen([sys.executable, "-m", "trueup.core.cli", "misbehave", "lines"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"0\n"
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


def test_doctor_as_text_and_as_json():
    done = subprocess.run([sys.executable, "-m", "trueup.core.cli", "doctor", "--json"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["packages"]["trueup-core"] == report["packages"]["trueup-models"]
    assert report["path"]["name"] in ("own", "hostnpu", "device")
    assert report["path"]["reason"] in " ".join(doctor.render(report).split())
    assert report["schemas"]["differences"] == {}


def test_doctor_wraps_to_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    report = doctor.examine()
    assert max(map(len, doctor.render(report | {"os": "word " * 40}).splitlines())) <= 60


@pytest.mark.parametrize(("change", "expected"), [
    ({"npus": 8}, "pip install 'torch_npu=="),
    ({"torch_npu": "2.13.0", "npus": 8}, "set_env.sh"),
    ({"path": {"name": "hostnpu", "reason": ""}}, "No NPU is in use"),
    ({"path": {"name": None, "reason": "torch_npu 2.9.0 needs torch 2.9"}}, "torch_npu 2.9.0 needs torch 2.9"),
    ({"schemas": {"differences": {"npu_x": {"ours": "npu_x(a)", "installed": None}}}}, "no such operator"),
    ({"schemas": {"differences": {"npu_x": {"ours": "npu_x(a)", "installed": "npu_x(b)"}}}}, "npu_x(b)"),
    ({"packages": {"trueup-core": "0.1.0", "trueup-models": "0.2.0"}}, "same version"),
])
def test_doctor_advises(change, expected):
    well = {"torch": "2.13.0+cpu", "torch_npu": None, "npus": 0, "path": {"name": "own", "reason": ""},
            "schemas": {"differences": {}}, "packages": {"trueup-core": "0.1.0"}}
    assert [text for text in doctor.advise(well) if "CUDA" not in text] == []
    assert expected in "\n".join(doctor.advise(well | change))


def test_doctor_reads_version_files(tmp_path, monkeypatch):
    info = tmp_path / "aarch64-linux/ascend_toolkit_install.info"
    info.parent.mkdir()
    info.write_text("package_name=Ascend-cann-toolkit\nversion=8.5.0\narch=aarch64\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert doctor.examine()["cann"] == f"8.5.0, {tmp_path}"


def test_a_doctors_topic_that_cannot_be_loaded_says_so(capsys, monkeypatch):
    """Not the plain report under another name."""
    monkeypatch.setattr(doctor, "entry_points", lambda group: [EntryPoint("lost", "trueup.no_such_module", group)])
    assert cli.main(["doctor", "lost"]) == 2
    out = capsys.readouterr()
    assert out.out == "" and "the topic 'lost' cannot be loaded: No module named 'trueup.no_such_module'" in out.err
