"""Every member is a package that stands alone: same Python range, bounded siblings, typed, documented."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = sorted(p.parent for pattern in ("packages/*", "apps/*") for p in ROOT.glob(f"{pattern}/pyproject.toml"))


def project(member: Path) -> dict:
    return tomllib.loads((member / "pyproject.toml").read_text())["project"]


PROJECTS = {member: project(member) for member in MEMBERS}
VERSIONS = {p["name"]: p["version"] for p in PROJECTS.values()}

# Members with a release. Any other name could be taken by anybody, so no text may tell a reader to install it from there.
ON_PYPI: set[str] = set()
INSTALLS = re.compile(r"""install(?:\s+-[\w-]+)*\s+["'`\\]*(deepinfer-[a-z-]+)""")

each_member = pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.name)


def test_the_seven_members_exist():
    assert set(VERSIONS) == {
        "deepinfer-cache",
        "deepinfer-kernels-ascend",
        "deepinfer-kernels-cuda",
        "deepinfer-offline",
        "deepinfer-sched",
        "deepinfer-specdec",
        "deepinfer-structured",
    }


@each_member
def test_sibling_bounds_admit_the_current_version(member):
    p = PROJECTS[member]
    listed = [*p["dependencies"], *(r for extra in p.get("optional-dependencies", {}).values() for r in extra)]
    for text in listed:
        requirement = Requirement(text)
        if requirement.name in VERSIONS and requirement.name != p["name"]:
            assert requirement.specifier, f"{member.name}: {text} has no version bound"
            assert requirement.specifier.contains(VERSIONS[requirement.name]), f"{member.name}: {text} is stale"


@each_member
def test_python_range_and_licence_agree(member):
    p = PROJECTS[member]
    assert p["requires-python"] == ">=3.11,<3.14"
    assert p["license"] == "Apache-2.0"
    assert (member / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    versions = {name.rpartition(" ")[2] for name in p["classifiers"] if "Python :: 3." in name}
    assert versions == {"3.11", "3.12", "3.13"}


@each_member
def test_is_typed_and_documented(member):
    assert list(member.glob("src/*/py.typed")), f"{member.name} has no py.typed"
    readme = (member / "README.md").read_text()
    assert readme.startswith("# ")
    assert "pip install" in readme, f"{member.name}: the README does not say how to install it"
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert [link for link in links if "://" not in link] == [], f"{member.name}: a package index has no such page"
    changelog = (member / "CHANGELOG.md").read_text()
    assert PROJECTS[member]["version"] in changelog, f"{member.name}: the changelog lacks the current version"


@each_member
def test_has_its_own_tests(member):
    assert list(member.glob("tests/**/test_*.py"))


def test_no_text_installs_a_name_that_has_no_release():
    listed = subprocess.run(["git", "ls-files", "*.md", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = [
        f"{name}: {match.group()}"
        for name in listed.stdout.split()
        if (ROOT / name).is_file() and not Path(__file__).samefile(ROOT / name)
        for match in INSTALLS.finditer((ROOT / name).read_text(encoding="utf-8"))
        if match[1] not in ON_PYPI
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    ['pip install "deepinfer-cache[vllm]"', "pip install --no-deps deepinfer-cache", "`install deepinfer-cache`"],
)
def test_an_installation_by_name_is_seen(text):
    assert INSTALLS.search(text)[1] == "deepinfer-cache"
    assert not INSTALLS.search(text.replace("deepinfer-", "./packages/deepinfer-"))
