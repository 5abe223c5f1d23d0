import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("plan_release", ROOT / ".github/scripts/plan_release.py")
plan_release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plan_release)


def tree(tmp_path, version="1.2.0", changelog="## 1.2.0 (2026-11-29)\n"):
    member = tmp_path / "packages/deepinfer-sched"
    member.mkdir(parents=True)
    (member / "pyproject.toml").write_text(f'[project]\nname = "deepinfer-sched"\nversion = "{version}"\n')
    (member / "CHANGELOG.md").write_text(f"# Changelog\n\n{changelog}")
    return tmp_path


def test_a_matching_tag_names_its_member(tmp_path):
    assert plan_release.plan("deepinfer-sched-v1.2.0", tree(tmp_path)) == "deepinfer-sched"


@pytest.mark.parametrize(
    ("tag", "version", "changelog", "reason"),
    [
        ("v1.2.0", "1.2.0", "## 1.2.0 (2026-11-29)\n", "is not <dist>-v<version>"),
        ("deepinfer-sched-v1.3.0", "1.2.0", "## 1.2.0 (2026-11-29)\n", "tag says 1.3.0"),
        ("deepinfer-sched-v1.2.0", "1.2.0", "## 1.2.0 (unreleased)\n", "no dated section"),
        ("deepinfer-sched-v1.2.0", "1.2.0", "## 1.2.0\n", "no dated section"),
        ("deepinfer-other-v1.2.0", "1.2.0", "## 1.2.0 (2026-11-29)\n", "not a member"),
    ],
)
def test_a_tag_that_disagrees_with_the_tree_is_refused(tmp_path, tag, version, changelog, reason):
    with pytest.raises(SystemExit, match=reason):
        plan_release.plan(tag, tree(tmp_path, version, changelog))
