"""docs/concepts.md names what is there, and every section of the articles."""

import ast
import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_TEXT = (_ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")

# Title -> its sections, in order.
_ARTICLES = {
  "大语言模型训练机制全解·第二篇：从预训练到部署的工程实践核心技术": (
    "1.1 预训练的目标",
    "1.2 数据来源与处理",
    "1.3 分词（Tokenization）",
    "1.4 预训练超参数",
    "1.5 Scaling Laws——扩展法则",
    "1.6 数据课程（Data Curriculum）",
    "2.1 监督微调（SFT）",
    "2.2 基于人类反馈的强化学习（RLHF）",
    "2.3 DPO——直接偏好优化",
    "2.4 安全对齐与红队测试",
    "3.1 数据并行（Data Parallelism）",
    "3.2 模型并行（Model Parallelism）",
    "3.3 3D 并行",
    "3.4 ZeRO 优化——极致显存节省",
    "3.5 通信原语",
    "4.1 为什么需要混合精度",
    "4.2 标准混合精度流程",
    "4.3 损失缩放（Loss Scaling）",
    "4.4 BF16——大模型训练的首选",
    "4.5 自动混合精度（AMP）",
    "5.1 动机",
    "5.2 原理",
    "5.3 与学习率的关系",
    "5.4 与分布式训练的协同",
    "6.1 梯度检查点（Gradient Checkpointing）",
    "6.2 FlashAttention",
    "6.3 高效数据加载",
    "7.1 梯度裁剪",
    "7.2 损失尖峰（Loss Spike）",
    "7.3 关键监控指标",
    "8. 全文总结——四大瓶颈与解决方案",
  ),
  "大语言模型训练流程": (
    "训练全流程概览",
    "第一阶段：预训练（Pre-training）",
    "预训练：目标",
    "训练数据构成",
    "数据处理流水线",
    "训练基础设施",
    "训练稳定性挑战",
    "对部署的影响",
    "第二阶段：监督微调（SFT）",
    "监督微调：目标",
    "训练数据格式",
    "SFT 训练细节",
    "常见的指令数据类型",
    "第三阶段：对齐（Alignment）",
    "为什么需要对齐",
    "方法一：RLHF（Reinforcement Learning from Human Feedback）",
    "方法二：DPO（Direct Preference Optimization）",
    "RLHF vs DPO 对比",
    "部署视角",
    "训练与部署的关系",
    "模型选型 Checklist",
    "面试视角",
  ),
  "大模型训练与优化：从理论到实践的技术深度解析": (
    "引言：大模型时代的挑战与机遇",
    "1.1 分布式训练范式",
    "1.2 显存优化技术",
    "2.1 数据收集与预处理",
    "2.2 预训练任务",
    "3.1 参数高效微调（PEFT）",
    "3.2 指令微调（Instruction Tuning）",
    "3.3 领域适配",
    "4.1 模型量化",
    "4.2 推理加速",
    "4.3 模型压缩",
    "5.1 训练框架",
    "5.2 推理框架",
    "5.3 调试与监控",
    "6.1 训练最佳实践",
    "6.2 推理部署最佳实践",
    "6.3 未来趋势",
    "结语",
  ),
}


def _rows(text: str) -> list[list[str]]:
  """The cells of the tables: technique, file, test, correction."""
  lines = [line for line in text.splitlines() if line.startswith("| ")]
  rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
  return [[c.strip() for c in row] for row in rows if "technique" not in row[0]]


def _missing(row: list[str], root: pathlib.Path) -> list[str]:
  """What a row names that is not there."""
  _, file, test, _ = row
  problems = []
  for cell, is_test in ((file, False), (test, True)):
    names = re.findall(r"`([^`]+)`", cell)
    if not names and cell != "not yet":
      problems.append(f"{cell!r} is neither `a name` nor 'not yet'")
    for name in names:
      path, _, function = name.partition("::")
      if not (root / path).is_file():
        problems.append(f"there is no {path}")
      elif is_test and function not in _functions(root / path):
        problems.append(f"there is no {name}")
  return problems


def _functions(path: pathlib.Path) -> set[str]:
  body = ast.parse(path.read_text()).body
  return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_every_section_of_every_article_stands_once():
  found, title = {}, None
  for line in _TEXT.splitlines():
    if line in _ARTICLES:
      title = line
      assert title not in found
      found[title] = []
    elif line.startswith("### "):
      found[title].append(line.removeprefix("### ").split(" · ")[0])
  assert {title: tuple(sections) for title, sections in found.items()} == (
    _ARTICLES
  )


def test_what_is_named_exists():
  rows = _rows(_TEXT)
  assert len(rows) > 100
  problems = {row[0]: _missing(row, _ROOT) for row in rows}
  assert not {name: found for name, found in problems.items() if found}


def test_a_file_has_a_test():
  """What is built is held by a test; what is not built has none."""
  for technique, file, test, _ in _rows(_TEXT):
    assert (file == "not yet") == (test == "not yet"), technique


@pytest.mark.parametrize(
  ("file", "test", "problem"),
  [
    ("`a.py`", "`test_a.py::test_one`", None),
    ("not yet", "not yet", None),
    ("`b.py`", "not yet", "there is no b.py"),
    ("`a.py`", "`test_b.py::test_one`", "there is no test_b.py"),
    ("`a.py`", "`test_a.py::test_two`", "there is no test_a.py::test_two"),
    ("`a.py`", "`test_a.py`", "there is no test_a.py"),
    ("`a.py`", "soon", "'soon' is neither `a name` nor 'not yet'"),
  ],
)
def test_the_check_can_fail(tmp_path, file, test, problem):
  (tmp_path / "a.py").write_text("")
  (tmp_path / "test_a.py").write_text("def test_one(): pass")
  found = _missing(["x", file, test, ""], tmp_path)
  assert found == ([problem] if problem else [])
