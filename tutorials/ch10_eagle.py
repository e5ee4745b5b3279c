# ---
# title:
#   en: "10. EAGLE: draft, verify, extend"
#   zh: "10. EAGLE：草稿、验证、扩展"
# outcome:
#   en: you can write down every tensor of a speculative round, and say which list of lengths belongs to which forward
#   zh: 能写出投机解码一轮里的每个张量，并说清每个长度列表属于哪一次前向
# minutes: 20
# prerequisites:
#   en: "[chapter 2](ch02_shapes.md) (layouts), [chapter 9](ch09_mtp.md) (what a row of a draft layer means)"
#   zh: "[第 2 章](ch02_shapes.md)（布局）、[第 9 章](ch09_mtp.md)（草稿层的一行是什么意思）"
# bugs: [SB-10, SB-19, SB-21, SB-23, SB-26]
# hardware:
#   en: any laptop; the same cells run on an NPU machine
#   zh: 任何笔记本电脑；同样的单元格也能在 NPU 机器上运行
# ---

# %% [markdown] tags=["en"]
# **The claim.** With k drafts a round has k + 1 forwards: k - 1 that *draft*, one that *verifies*, one that *extends*.
# Each has other rows, other lengths, other slots. Many bugs of speculative decoding take a list that was right for one
# forward into the next. Here each forward plans its own [`Layout`][trueup.core.Layout], and what passes between them is
# unpadded and kept by request id.
#
# The loop is that of EAGLE, a drafter that reads the target's hidden states. An MTP layer is served by the same loop.
# `Engine.step` is the whole of it:

# %% [markdown] tags=["zh"] pair="51adfb-7375d1"
# **要点。** 打 k 个草稿，一轮就有 k + 1 次前向：k - 1 次*打草稿*（draft），一次*验证*（verify），一次*扩展*（extend）。
# 每次前向的行、长度、槽位都不一样。投机解码的许多缺陷，都是把对上一次前向正确的列表带进了下一次。
# 在这里，每次前向各自规划自己的 [`Layout`][trueup.core.Layout]；在它们之间传递的东西不带填充，按请求 id 存放。
#
# 这个循环来自 EAGLE，一种读取目标模型隐藏状态的草稿器；MTP 层用的也是同一个循环。全部内容就是 `Engine.step`：

# %%
import inspect
import textwrap

from trueup.core import Engine

lines = inspect.getsource(Engine.step).splitlines()
begin = next(i for i, line in enumerate(lines) if "schedule()" in line)  # after the docstring
source = textwrap.dedent("\n".join(lines[begin:]))
print(source)
order = [source.index(name) for name in ("propose(", "plan(", "_target(", "learn(")]
assert order == sorted(order)

# %% [markdown] tags=["en"]
# `propose` drafts, `_target` verifies, `learn` extends. The rest is bookkeeping.
#
# ## One round, every tensor
#
# Three requests have 130, 5 and 256 tokens in the cache, in pages of 128. k is 3. The target is
# [`ScriptedModel`][trueup.core.ScriptedModel], the arithmetic of [chapter 9](ch09_mtp.md): what it says next is a sum
# over the tokens that it reads back from the cache. Its draft model is right whenever all that it gets is right. We
# spoil two drafts, so that the target will keep 2, 0 and 3, and write down what the draft model is fed.

# %% [markdown] tags=["zh"] pair="3d9584-4a2f2b"
# `propose` 打草稿，`_target` 验证，`learn` 扩展；其余都是记账。
#
# ## 一轮，每个张量
#
# 三个请求，缓存里各有 130、5、256 个词元，一页 128 个，k 取 3。目标模型用 [`ScriptedModel`][trueup.core.ScriptedModel]，
# 即[第 9 章](ch09_mtp.md)的那套算术：它接下来说什么，由从缓存里读回的词元求和得出。
# 配给它的草稿模型，只要拿到的东西全对，给出的草稿就对。我们故意弄错两个草稿，让目标模型分别保留 2、0、3 个，并记下草稿模型收到了什么。

# %%
from trueup.core import EngineConfig, ScriptedModel
from trueup.core.sampling import SamplingParams
from trueup.core.scripted import ScriptedDraftModel
from trueup.core.speculation.chain import ChainDrafter


class Spoiled(ScriptedDraftModel):
    """Wrong in the first draft of request 2 and in the third of request 1.  Hidden rows are one-hot."""

    def forward(self, tokens, hidden, view, pools):
        self.fed.append((tokens.tolist(), hidden.argmax(-1).tolist()))  # [Tp] each
        return super().forward(tokens, hidden, view, pools)

    def logits(self, hidden):  # [B, V]; called once for each depth
        self.depth += 1
        if (row := {1: 1, 3: 0}.get(self.depth)) is not None:
            hidden = hidden.clone()
            hidden[row] = hidden[row].roll(1)
        return hidden


# %%
target = ScriptedModel()
draft = Spoiled(target)
config = EngineConfig(num_pages=7, max_requests=3, prefill_tokens=1000, buckets=(3,))
engine = Engine(target, config, ChainDrafter(draft, draft_tokens=3))
for r, length in enumerate((130, 5, 256)):
    engine.add([(i + 7 * r) % 97 for i in range(length)], SamplingParams(max_tokens=20))
draft.fed, draft.depth = [], 0
first = engine.step()  # the prompts
draft.fed = []
done = engine.step()  # the round to look at

drafting_1, drafting_2, extending = done.draft_layouts
layouts = (*done.draft_layouts, done.layout)
modes = [layout.segments[0].mode.value for layout in layouts]
assert modes == ["draft", "draft", "draft_extend", "verify"]

# %% [markdown] tags=["en"]
# **Before.** The round begins with one *pending* token for each request. The target has sampled it, but it has not run
# yet: no cache row, no hidden state. The drafter remembers one hidden row for each request. Its next draft can be read
# off that row.

# %% [markdown] tags=["zh"] pair="df3dc0-50c9b2"
# **开始之前。** 每个请求有一个*待定词元*（pending）：目标模型已经采样出来，但还没有跑过，没有缓存行，也没有隐藏状态。
# 草稿器替每个请求记着一行隐藏状态，下一个草稿从这一行就能读出来。

# %%
pending = [first.tokens[r][0] for r in (1, 2, 3)]
drafts = [done.drafted[r] for r in (1, 2, 3)]
assert pending == [37, 48, 64]
assert drafts == [(34, 60, 87), (46, 76, 5), (22, 72, 96)]

# %% [markdown] tags=["en"]
# **Draft.** The first drafts, 34, 46 and 22, need no forward. Each later one takes a forward of one row a request. The
# row at position p holds the token at p + 1, so the first draft, which will be token 131 of request 1, is paired with
# position 130. Its slot is page times 128 plus offset: position 130 is row 2 of the request's second page, page 2.

# %% [markdown] tags=["zh"] pair="112038-2f2dbc"
# **打草稿。** 第一个草稿 34、46、22 不需要前向。此后每个草稿要一次前向，每个请求一行。位置 p 的行里放的是 p + 1 处的词元，
# 所以第一个草稿（它将是请求 1 的第 131 号词元）配的是位置 130。槽位是页号乘 128 加页内偏移：
# 位置 130 是这个请求第二页（2 号页）的第 2 行。

# %% tags=["fold"]
from trueup.core.picture import boxes


def row(label, values, style="real"):
    return label, [(str(value), style) for value in values]


def columns(layout, fed):
    (seg,) = layout.segments
    return [row("token [Tp]", fed[0]), row("position [Tp]", seg.positions), row("slot [Tp]", seg.slots),
            row("q_cum [Bp]", seg.q_cum), row("kv_lens [Bp]", seg.kv_lens)]


boxes([row("request", ("#1", "#2", "#3")), row("first forward:", []), *columns(drafting_1, draft.fed[0]),
       row("second forward:", []), *columns(drafting_2, draft.fed[1])],
      ("The two draft forwards. The second time every position and every key length is one more.",
       "打草稿的两次前向。第二次里，每个位置、每个键长度都多了一。"))

# %%
one, two = drafting_1.segments[0], drafting_2.segments[0]
assert (one.positions, one.slots) == ((130, 5, 256), (258, 389, 768))
assert (one.q_cum, one.kv_lens) == ((1, 2, 3), (131, 6, 257))
assert (two.positions, two.slots) == ((131, 6, 257), (259, 390, 769))
assert (two.q_cum, two.kv_lens) == ((1, 2, 3), (132, 7, 258))
assert one.pages == two.pages == ((1, 2, 0), (3, 0, 0), (4, 5, 6))
assert draft.fed[0][0] == [d[0] for d in drafts]
assert draft.fed[1][0] == [d[1] for d in drafts]

# %% [markdown] tags=["en"]
# The third drafts come out of the second forward. So three drafts take two forwards, and the third draft has no row in
# the draft cache yet.
#
# **Verify.** The target runs W = k + 1 = 4 rows of each request: the pending token and the drafts. Now the tokens stand
# at positions of their own. A position has the same slot in the target's pools as in those of the draft layer.

# %% [markdown] tags=["zh"] pair="e96386-209208"
# 第三个草稿由第二次前向得出。所以三个草稿用两次前向，而第三个草稿在草稿缓存里还没有行。
#
# **验证。** 目标模型为每个请求跑 W = k + 1 = 4 行：待定词元和三个草稿。这时词元放在自己的位置上；
# 同一个位置，在目标模型的池子里和在草稿层的池子里，槽位相同。

# %% tags=["fold"]
verifying = done.layout.segments[0]
fed = [token for x, d in zip(pending, drafts, strict=True) for token in (x, *d)]  # [Tp]
boxes([row("request", [f"#{r}" for r in (1, 2, 3) for _ in range(4)]), row("token [Tp]", fed),
       row("position [Tp]", verifying.positions), row("slot [Tp]", verifying.slots)],
      ("The verify forward: 12 token rows. Lengths and block table still have one entry for each request.",
       "验证的前向：12 个词元行。长度和块表仍是每个请求一项。"))

# %%
assert verifying.positions == (*range(130, 134), *range(5, 9), *range(256, 260))
assert verifying.slots == (*range(258, 262), *range(389, 393), *range(768, 772))
assert (verifying.q_cum, verifying.kv_lens) == ((4, 8, 12), (134, 9, 260))
assert verifying.pages == ((1, 2, 0), (3, 0, 0), (4, 5, 6))
assert sum(map(len, done.layout.scored_rows.values())) == 12  # logits [12, V]

# %% [markdown] tags=["en"]
# **Accept.** Row by row the target's own token is compared with the next draft. Request 1 keeps two drafts, request 2
# none, request 3 all. The token behind the kept ones is the target's own, so each gains one more: 3, 1 and 4. A cache
# row stays if its token did. The new token is pending again.

# %% [markdown] tags=["zh"] pair="d60d4f-2f7e8f"
# **接受。** 逐行比较：目标模型自己的词元，与下一个草稿是否相同。请求 1 保留两个草稿，请求 2 一个不留，请求 3 全部保留。
# 保留部分之后的那个词元是目标模型自己的，所以各自再多得一个：3、1、4 个。词元留下的，缓存行也留下；最后那个新词元又成了待定词元。

# %%
assert done.accepted == {1: 2, 2: 0, 3: 3}
assert done.tokens == {1: (34, 60, 86), 2: (45,), 3: (22, 72, 96, 30)}
assert done.written == {1: range(130, 133), 2: range(5, 6), 3: range(256, 260)}
committed = [engine.scheduler.requests[r].committed for r in (1, 2, 3)]
assert committed == [133, 6, 260]

# %% [markdown] tags=["en"]
# **Extend.** Now the draft layer runs over the same twelve rows, with the target's hidden states. This does three
# things. It gives the third draft a row. It replaces the rows that were made from the draft layer's own hidden states
# by better ones; an engine that skips this keeps fewer drafts (vLLM issue #14649 reports 8 to 15% shorter accepted
# runs). And its row behind the last kept draft predicts the first draft of the next round.
#
# Row j is paired with the token *after* it, by the target's word. Rows of rejected drafts come along, with token 0.
# They are computed for nothing, but the shape is the same whatever was kept, and that is what a graph needs.

# %% [markdown] tags=["zh"] pair="09cd80-28f46b"
# **扩展。** 草稿层再跑一遍同样的十二行，这回配的是目标模型的隐藏状态。这样做有三个作用：给第三个草稿补上一行；
# 把用草稿层自己的隐藏状态算出的行换成更好的，不换的引擎保留的草稿会少些（vLLM issue #14649 报告，接受长度短了 8% 到 15%）；
# 最后一个保留词元的那一行，预测出下一轮的第一个草稿。
#
# 第 j 行配的是它*后面*的词元，以目标模型的决定为准。被拒绝的草稿的行也一起跑，配的是词元 0。
# 这些行是白算的，但这样一来，不管保留了几个，形状都一样，而计算图要的正是这个。

# %% tags=["fold"]
kept = [3, 1, 4]
style = ["real" if i < n else "pad" for n in kept for i in range(4)]
tokens, hidden = draft.fed[2]


def styled(label, values):
    return label, [(str(value), s) for value, s in zip(values, style, strict=True)]


boxes([styled("request", [f"#{r}" for r in (1, 2, 3) for _ in range(4)]), styled("token after it", tokens),
       styled("target's hidden", hidden), styled("position", extending.positions)],
      ("The extend forward. Dashed rows are those of rejected drafts. Drafting goes on from rows 2, 4 and 11.",
       "扩展的前向。虚线是被拒绝的草稿的行。下一轮从第 2、4、11 行接着打草稿。"))

# %%
assert tokens == [34, 60, 86, 0, 45, 0, 0, 0, 22, 72, 96, 30]
last = [i * 4 + n - 1 for i, n in enumerate(kept)]
assert last == [2, 4, 11]
assert [tokens[i] for i in last] == [done.tokens[r][-1] for r in (1, 2, 3)]
same = extending.segments[0]
assert (same.positions, same.slots) == (verifying.positions, verifying.slots)
assert (same.q_cum, same.kv_lens) == (verifying.q_cum, verifying.kv_lens)

# %% [markdown] tags=["en"]
# If all this is right, so is every draft of the next round, and it is.

# %% [markdown] tags=["zh"] pair="dae23d-60c089"
# 这一切都对，下一轮的草稿就会全对。果然如此：

# %%
following = engine.step()
assert following.accepted == {1: 3, 2: 3, 3: 3}

# %% [markdown] tags=["en"]
# ## The same round, as operators see it
#
# Now the nano model with its MTP layer. Three requests are padded to four. The *shape ledger* records every operator
# call; these are the attention calls of one round, three layers of the target in one line each. T counts token rows,
# `kv` is the list of key lengths. A padded request sees its own rows only, on the dummy page.

# %% [markdown] tags=["zh"] pair="8af19d-7f8544"
# ## 同样的一轮，算子看到的样子
#
# 换成 nano 模型和它的 MTP 层，三个请求填充到四个。*形状账本*记下每一次算子调用；下面是一轮里的注意力调用，
# 目标模型的三层各占一行。T 是词元行数，`kv` 是键长度列表。填充的请求只看得到哑页上它自己的行。

# %%
from trueup.core import ledger
from trueup.models import LLM
from trueup.models.drafters import make_drafter

llm = LLM.from_pretrained("glm-4.7-flash-nano", progress=False)
nano = llm.model
PROMPTS = ["class Stack:\n    def __init__(self, items=None):", "for name in sorted(",
           "import os\nimport sys\n\ndef main(argv):\n"]


def start(spec, prompts=PROMPTS):
    engine = Engine(nano, drafter=make_drafter(spec, nano, 3) if spec else None)
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    for prompt in prompts:
        engine.add(llm.tokenizer.encode(prompt), params)
    return engine


# %%
engine = start("mtp")
engine.step()
with ledger.record(engine) as led:
    engine.step()

calls = []
for call in led.only(operator="npu_fused").calls:
    operands = {operand.name: operand for operand in call.operands}
    kv, T = list(operands["actual_seq_kvlen"].values), call.batch["T"]
    calls.append((call.owner.split(".")[0], T, kv))
    print(f"{call.owner:<28} {call.mode.value:<13} {T!s:<11} kv {kv}")

owners, rows, lengths = zip(*calls, strict=True)
assert owners == ("mtp", "mtp", "layers", "layers", "layers", "mtp")
assert [T.size for T in rows] == [4, 4, 16, 16, 16, 16] and rows[0].real == 3
begin = lengths[0][0] - 1  # what the first request had in the cache
assert [kv[0] - begin for kv in lengths] == [1, 2, 4, 4, 4, 4]

# %% [markdown] tags=["en"]
# ## One list for all steps (SB-10)
#
# A graph reads its lengths from a fixed address. So it is tempting to keep one buffer, and to build the metadata of all
# draft steps before the loop begins. In [SB-10](../bugs.md#sb-10) (vllm-ascend PR #10878) every step then saw the last
# step's lengths:

# %% [markdown] tags=["zh"] pair="ffa847-58e4a9"
# ## 所有步共用一个列表（SB-10）
#
# 计算图从固定的地址读长度，于是很容易想到只留一个缓冲区，在循环开始之前就把所有草稿步的元数据建好。
# [SB-10](../bugs.md#sb-10)（vllm-ascend PR #10878）里，结果每一步看到的都是最后一步的长度：

# %% tags=["raises-exception"] raises="AssertionError" says="[[13, 23], [13, 23], [13, 23]]"
cached, buffer, metadata = [10, 20], [0, 0], []
for step in (1, 2, 3):
    buffer[:] = [n + step for n in cached]
    metadata.append(buffer)
assert metadata == [[11, 21], [12, 22], [13, 23]], metadata

# %% [markdown] tags=["en"]
# With one draft there are no such steps, and all is well. With more, the first steps attend to rows that have not been
# written yet. A layout is frozen, and a later one cannot change it:

# %% [markdown] tags=["zh"] pair="cc83a7-02d489"
# 只打一个草稿时没有这些步，一切正常；草稿一多，前面几步的注意力就会看到还没有写过的行。
# 布局是冻结的，后来的布局改不了它：

# %%
from trueup.core import materialise, plan
from trueup.core.layout import Mode
from trueup.core.planning import Work

views = []
for step in (1, 2, 3):
    work = [Work(r, Mode.DRAFT, start=10 * r + step - 1, length=1, pages=(r,)) for r in (1, 2)]
    views.append(materialise(plan(work, page_size=128), engine.pools).segments[0])
host, device = [v.kv_lens for v in views], [v.kv_lens_device.tolist() for v in views]
assert host == device == [[11, 21], [12, 22], [13, 23]]

# %% [markdown] tags=["en"]
# ## Rejected rows stay behind (SB-21)
#
# After a verify of four rows the cache holds four more rows, but not all of them belong to the text. Request 2 of the
# worked example was at 5, verified up to 9, and kept one row: its length is 6. In [SB-21](../bugs.md#sb-21)
# (vllm-ascend PR #14883) the draft steps went on from 9, so they attended to tokens that had just been rejected.

# %% [markdown] tags=["zh"] pair="5d17cf-ef68d7"
# ## 被拒绝的行留在后面（SB-21）
#
# 验证四行之后，缓存里多了四行，但并非都属于文本。上面例子里的请求 2 原来有 5 个词元，验证到 9，只留下一行，所以长度是 6。
# [SB-21](../bugs.md#sb-21)（vllm-ascend PR #14883）里，草稿步从 9 接着走，注意力便看到了刚被拒绝的词元。

# %%
after = following.draft_layouts[0].segments[0]
assert committed[1] == 6 and verifying.kv_lens[1] == 9
assert after.positions[1] == 6 and after.kv_lens[1] == 7  # not 9 and 10

# %% [markdown] tags=["en"]
# Nothing is erased. The rejected rows lie behind every length, and the next forward writes over them before a length
# reaches them. That can be tested: after each round, fill with NaN all that lies behind the committed lengths. If a row
# of it were read, texts or acceptance would change. And to see that the test can fail: with one row more, they do.

# %% [markdown] tags=["zh"] pair="6c902d-c5612b"
# 没有什么需要擦除。被拒绝的行在一切长度之外，等到长度够到它们时，后面的前向早已把它们覆盖。这可以检验：
# 每轮之后，把已提交长度以外的内容全部填成 NaN。只要读到其中任何一行，文本或接受率就会变。
# 再看这项检验会不会失败：多填一行，结果果然变了。

# %%
def rounds(engine, poison=None):
    while engine.has_work:
        done = engine.step()
        yield done.tokens, done.accepted
        for request in () if poison is None else engine.scheduler.requests.values():
            behind = range(request.committed + poison, len(request.pages) * 128)
            slots = [request.pages[p // 128] * 128 + p % 128 for p in behind]
            for pool in (*engine.pools.latent, *engine.pools.rope):  # MTP's are among them
                pool.flatten(0, 1)[slots] = float("nan")


clean = list(rounds(start("mtp")))
assert list(rounds(start("mtp"), poison=0)) == clean
assert any(n < 3 for _, accepted in clean for n in accepted.values())  # there were rejections

# %% tags=["raises-exception"] raises="AssertionError" says="a row was read"
assert list(rounds(start("mtp"), poison=-1)) == clean, "a row was read"

# %% [markdown] tags=["en"]
# ## What is carried, and by whom (SB-19)
#
# Between two rounds the drafter keeps one hidden row for each request. Four requests, rows 0 to 3. Then the second
# request ends. In [SB-19](../bugs.md#sb-19) (sglang issue #30854) the other tensors were filtered and the carried rows
# were not:

# %% [markdown] tags=["zh"] pair="b70ae4-98e0d0"
# ## 谁带着什么（SB-19）
#
# 两轮之间，草稿器替每个请求留着一行隐藏状态。四个请求，四行，编号 0 到 3。然后第二个请求结束了。
# [SB-19](../bugs.md#sb-19)（sglang issue #30854）里，别的张量都筛过，携带的行没有筛：

# %% tags=["raises-exception"] raises="RuntimeError" says="must match"
import torch

carried = torch.arange(4.0)[:, None].expand(4, 2)  # [B, H], rows of requests 0, 1, 2, 3
embedded = torch.zeros(3, 2)  # [B, H], of requests 0, 2, 3
embedded + carried

# %% [markdown] tags=["en"]
# That one is lucky. If request 4 joins in the same round, the counts agree and three requests get a row of somebody
# else. So a row is never carried by its number. It is kept by request id, without padding, and `for_layout` puts it
# where the next layout wants it. No other function pads what outlives a forward.

# %% [markdown] tags=["zh"] pair="3a2180-68ac75"
# 这还算走运。要是同一轮里正好有请求 4 加入，行数就对上了，却有三个请求拿到了别人的行。所以行绝不按行号携带，
# 而是按请求 id 存放，不带填充；由 `for_layout` 放到下一个布局要它的地方。跨前向保留的东西，只有这一个函数填充。

# %%
from trueup.core.carry import for_layout

by_request = {r: torch.full((1, 2), float(r)) for r in range(4)}  # [1, H] each
del by_request[1]  # it has ended
by_request[4] = torch.full((1, 2), 4.0)  # what its prompt left
work = [Work(r, Mode.DRAFT, start=5, length=1, pages=(r + 1,)) for r in (0, 2, 3, 4)]
batch = plan(work, page_size=128, buckets=(8,))
rows = for_layout(by_request, batch)
assert rows.layout is batch
assert rows.tensor[:, 0].tolist() == [0, 2, 3, 4, 0, 0, 0, 0]  # padding is zeros

# %% [markdown] tags=["en"]
# ## Pages come back (SB-23)
#
# A round needs room for all drafts, though it may keep none. In [SB-23](../bugs.md#sb-23) (sglang-jax issue #1147) each
# round reserved that room, the counter of reserved tokens stood still, and the end of a request gave back only what was
# committed. Pages of 4, a prompt of 6, one round that keeps nothing:

# %% [markdown] tags=["zh"] pair="9b486b-85d097"
# ## 页要还回来（SB-23）
#
# 一轮要给全部草稿留出位置，尽管可能一个也不保留。[SB-23](../bugs.md#sb-23)（sglang-jax issue #1147）里，
# 每轮都预留这些位置，记录预留量的计数器却没有动，请求结束时只归还了已提交的部分。一页 4 个词元，提示词 6 个，跑一轮，一个草稿也没留下：

# %% tags=["raises-exception"] raises="AssertionError" says="1 page lost"
from trueup.core.pages import PagePool

pool = PagePool(9, 4)
held = pool.allocate(pool.pages_for(6 + 4))  # the prompt, and W = 4 rows of a round
pool.release(held[: pool.pages_for(6 + 1)])  # at the end: what was committed
assert pool.free == 8, f"{8 - pool.free} page lost"

# %% [markdown] tags=["en"]
# trueup allots a request's pages once, when it is admitted, for prompt and `max_tokens` together. Drafts never reach
# past that ([chapter 9](ch09_mtp.md)). Its one list of pages is used to plan and to release. So at any time committed
# rows fit what is held, and however a request ends, all of it comes back:

# %% [markdown] tags=["zh"] pair="d0b7a0-0f5b53"
# trueup 在请求被接纳时一次分给它全部的页，按提示词加 `max_tokens` 计算；草稿不会越过这个范围（[第 9 章](ch09_mtp.md)）。
# 规划和归还用的是同一份页列表。所以任何时候，已提交的行都装得下；请求无论怎样结束，页全部归还：

# %%
from trueup.core import ScriptedDrafter

prompt, ends = [5] * 6, {}
for end in ("stop", "length", "abort"):
    eos = ScriptedModel().expected(prompt, 9)[7] if end == "stop" else -1
    model = ScriptedModel(eos_token_ids=(eos,))
    script = (0, 3, 1, 2, 0)  # drafts kept, round by round
    drafter = ScriptedDrafter(model.expected, script, 3, model.vocab_size)
    short = Engine(model, EngineConfig(page_size=4), drafter)
    all_pages, r = short.pages.free, short.add(prompt, SamplingParams(max_tokens=20))
    while short.has_work:
        done = short.step()
        if done.finished:
            ends[end] = done.finished[r]
        for request in short.scheduler.requests.values():
            assert request.committed <= len(request.pages) * 4
        if end == "abort" and done.number == 3:
            short.abort(r)
    assert short.pages.free == all_pages
assert ends == {"stop": "stop", "length": "length"}

# %% [markdown] tags=["en"]
# ## An EAGLE-3 head
#
# An MTP layer is trained together with its model. An *EAGLE-3 head* is trained afterwards, so any model can have one.
# The loop above serves it unchanged. The layer itself differs in almost everything:
#
# | | MTP layer | EAGLE-3 head |
# |---|---|---|
# | reads of the target | one state, after the final norm | three states, entering a low, a middle and a high layer |
# | makes them one | nothing to do | `fc`, of the target's states only |
# | joins token and state | before the layer: `eh`, 2H to H | in attention: `q`, `k`, `v` are 2H wide |
# | attention and cache | MLA, a layer in the target's pools | ordinary, keys and values in pools of its own |
# | hands on to its next step | what left its norm | what **enters** its norm |
# | speaks | the target's vocabulary, by the target's head | a part of it, by a head of its own |
#
# The nano model has a trained one. (`trueup generate --spec eagle3` uses it.) H is the hidden width, G counts key
# heads, D is their width, P is the page size.

# %% [markdown] tags=["zh"] pair="d05341-348bed"
# ## EAGLE-3 头
#
# MTP 层与模型一起训练；*EAGLE-3 头*是事后训练的，所以任何模型都可以配一个。上面的循环原样为它服务，层本身却几乎处处不同：
#
# | | MTP 层 | EAGLE-3 头 |
# |---|---|---|
# | 读目标模型的什么 | 一个状态，最终归一化之后 | 三个状态，分别进入低、中、高三层 |
# | 怎样合成一个 | 不用合 | `fc`，只用于目标模型的状态 |
# | 词元与状态在哪里拼接 | 在层之前：`eh`，从 2H 到 H | 在注意力里：`q`、`k`、`v` 的输入宽 2H |
# | 注意力与缓存 | MLA，在目标模型的池子里占一层 | 普通注意力，键和值在自己的池子里 |
# | 交给自己下一步的 | 归一化之后的 | 归一化**之前**的 |
# | 用什么说话 | 目标模型的词表和 `lm_head` | 词表的一部分，自己的 `lm_head` |
#
# nano 模型有一个训练好的头（`trueup generate --spec eagle3` 用的就是它）。H 是隐藏维度，G 是键头数，D 是键头的宽度，P 是页大小。

# %%
eagle = start("eagle3")
head, H = eagle.drafter.model, nano.config.hidden_size
G, D = head.c.num_key_value_heads, head.c.head_dim
assert head.taps == (1, 2, 3) == eagle.drafter.taps  # 3: what leaves the last layer
assert head.fc.shape == (H, 3 * H)
assert head.q.shape[1] == head.k.shape[1] == head.v.shape[1] == 2 * H

latent, own = eagle.pools.latent[0], eagle.drafter.pools.key[0]
assert own.shape == (*latent.shape[:2], G, D)  # [pages, P, G, D], the same pages
assert latent.shape[2:] == (1, nano.config.kv_lora_rank)  # [pages, P, 1, R]

# %% [markdown] tags=["en"]
# Page ids are shared, shapes are not. In [SB-26](../bugs.md#sb-26) (sglang PR #26049) the draft layer's cache took its
# value width from the target's config: 256, where the draft layer writes 64. The same here, with a value pool twice as
# wide as the head's values:

# %% [markdown] tags=["zh"] pair="d3dc39-117191"
# 页号共用，形状不共用。[SB-26](../bugs.md#sb-26)（sglang PR #26049）里，草稿层缓存的值宽度取自目标模型的配置，是 256，
# 而草稿层写的是 64。这里照样来一次，把值的池子造得宽一倍：

# %% tags=["raises-exception"] raises="ContractError" says="as the rows to be written"
key, value = own.new_zeros(3, G, D), own.new_zeros(3, G, D)  # [T, G, D] each
too_wide = own.new_zeros(*own.shape[:3], 2 * D)  # [pages, P, G, 2D]
slots = torch.tensor([128, 129, 130], device=own.device)  # [T]
torch.ops.npu.npu_scatter_pa_kv_cache(key, value, own, too_wide, slots, cache_mode="Norm")

# %% [markdown] tags=["en"]
# So the drafter asks the *module that writes* for its pools (`make_pools`). An MTP layer answers with the target's.
#
# ## A smaller vocabulary
#
# Of so small a layer, an output head over the whole vocabulary would be the largest part. So an EAGLE-3 head speaks
# frequent tokens only. In a published one for GLM-4.7-Flash, with hidden width 2048:

# %% [markdown] tags=["zh"] pair="c13fab-1f4bb4"
# 所以草稿器向*写缓存的模块*要池子（`make_pools`）；MTP 层交出的就是目标模型的池子。
#
# ## 小一些的词表
#
# 这么小的一层，如果输出头覆盖整个词表，它就成了最大的一块。所以 EAGLE-3 头只说常见的词元。
# 公开发布的 GLM-4.7-Flash 的头，隐藏维度 2048：

# %%
wide, inner = 2048, 8192
attention = wide * wide * (2 + 1 + 1)  # q; k and v, for a quarter of the heads; o
layer = 3 * wide * wide + attention + 3 * wide * inner  # fc, attention, MLP
assert 0.79 < wide * 154_880 / (layer + wide * 154_880) < 0.81  # the target's vocabulary
assert 0.44 < wide * 32_000 / (layer + wide * 32_000) < 0.46  # the draft vocabulary

# %% [markdown] tags=["en"]
# Which tokens it speaks, its file says in two ways: `t2d` marks them among the target's ids, and `d2t` holds for each
# draft id the *difference* to the target's id. Tokens 0, 2 and 5 of six:

# %% [markdown] tags=["zh"] pair="af092f-b5546f"
# 它说哪些词元，文件里用两种方式写明：`t2d` 在目标模型的 id 里标出它们；
# `d2t` 为每个草稿 id 存一个*差*，加上它才是目标模型的 id。比如六个词元里的 0、2、5：

# %%
spoken = torch.tensor([0, 2, 5])  # [Vd]
d2t = spoken - torch.arange(3)  # [Vd]
t2d = torch.zeros(6, dtype=torch.bool).index_fill(0, spoken, True)  # [V]
assert d2t.tolist() == [0, 1, 3]  # not ids: used as ids they would say 0, 1 and 3
assert torch.equal(t2d.nonzero().flatten(), torch.arange(3) + d2t)

logits = head.logits(own.new_zeros(1, H))  # [B, V]
assert logits.shape == (1, nano.vocab_size) and len(head.target_ids) < nano.vocab_size
assert logits.isfinite()[0].nonzero().flatten().tolist() == head.target_ids.tolist()

# %% [markdown] tags=["en"]
# What the head cannot say has a logit of minus infinity, so it is never drafted. Such a token ends a run of kept drafts,
# and the target says it.
#
# ## Handed on before the norm
#
# An MTP layer hands on its normed state. The EAGLE-3 head does not: training fed the un-normed one back. Served the
# other way, it loses most where it has been fed with its own output most often:

# %% [markdown] tags=["zh"] pair="c75ee0-e86749"
# 头说不出的词元，logit 是负无穷，所以不会成为草稿。遇到这样的词元，一段保留的草稿就到头了，由目标模型来说它。
#
# ## 交出的是归一化之前的状态
#
# MTP 层交出归一化之后的状态。EAGLE-3 头不是：训练时送回去的是归一化之前的。反过来用，越是靠后、越多次吃进自己输出的草稿，损失越大：

# %%
from trueup.core.speculation.acceptance import Acceptance

MORE = [*PROMPTS, "    def test_empty(self):\n        self.", "def read_lines(path):\n",
        "try:\n    import json\nexcept"]


def finish(engine):
    """Texts, acceptance, and the tokens that a decoding request gains in a round."""
    texts, done = {r: [] for r in engine.scheduler.requests}, []
    while engine.has_work:
        done.append(engine.step())
        for r, tokens in done[-1].tokens.items():
            texts[r] += tokens
    rows = sum(len(step.tokens) for step in done)
    gained = sum(map(len, texts.values()))
    B = len(texts)  # the first token of each comes from its prompt
    return list(texts.values()), Acceptance.of(done), (gained - B) / (rows - B)


# %%
_, right, _ = finish(start("eagle3", MORE))
twisted = start("eagle3", MORE)
layer = twisted.drafter.model
un_normed = layer.forward


def normed(tokens, hidden, view, pools):
    drafting = view.layout.segments[0].mode is Mode.DRAFT  # fed with its own output
    return un_normed(tokens, layer.norm(hidden) if drafting else hidden, view, pools)


layer.forward = normed
_, wrong, _ = finish(twisted)
print("un-normed", [f"{share:.2f}" for share in right.by_depth])
print("normed   ", [f"{share:.2f}" for share in wrong.by_depth])
lost = [a - b for a, b in zip(right.by_depth, wrong.by_depth, strict=True)]
assert lost[2] > lost[0] and lost[2] > 0.05

# %% [markdown] tags=["en"]
# ## Side by side
#
# Three drafters, three drafts each. The third, `ngram`, has no model: it looks for the last place where the text read
# as it does now, and proposes what came next there. Often it finds nothing, so we count all rounds of decoding
# requests, with drafts or without. The second set of prompts repeats itself.

# %% [markdown] tags=["zh"] pair="ef8cbb-1c76e3"
# ## 放在一起比
#
# 三个草稿器，各打三个草稿。第三个 `ngram` 没有模型：它在文本里找上一处与现在相同的地方，提出当时接在后面的词元。
# 它常常找不到，所以这里数的是解码请求的全部轮，有没有草稿都算。第二组提示词是重复的文本。

# %%
entries = "".join(f"    'error_{n}': {n},\n" for n in range(200, 206))
SETS = {"code": MORE, "repeats": ["codes = {\n" + entries, "assert a == 1\n" * 6, "x, y, z, " * 3]}
gains, plain = {}, {}
for spec in (None, "mtp", "eagle3", "ngram"):
    for name, prompts in SETS.items():
        texts, _, gains[spec, name] = finish(start(spec, prompts))
        assert texts == plain.setdefault(name, texts)  # the same text, whoever drafts
    code, repeats = gains[spec, "code"], gains[spec, "repeats"]
    print(f"{spec or 'none':<8} tokens a round: code {code:.2f}, repeats {repeats:.2f}")

assert gains[None, "code"] == gains[None, "repeats"] == 1
assert all(1 < gain <= 4 for (spec, _), gain in gains.items() if spec)
assert min(gains["mtp", "code"], gains["eagle3", "code"]) > gains["ngram", "code"]
assert gains["ngram", "repeats"] > gains["ngram", "code"]

# %% [markdown] tags=["en"]
# More tokens a round are not yet more speed. The two layers cost k forwards and a cache, the n-gram next to nothing.
# [Chapter 12](ch12_acceptance.md) does the sum.
#
# ## A module that nobody calls
#
# sglang PR #32881 removes a file, `python/sglang/srt/speculative/multi_layer_draft_forward_cg.py`. It recorded a graph
# for a part of the draft loop of multi-layer EAGLE. It was written with care: the first replay is compared with the
# plain path, bit for bit, and if anything goes wrong the plain path is used from then on. And no other file imported
# it. None ever had.
#
# It did no harm. Why is it a bug waiting to happen? By its own comments it is right as long as each step draws one
# candidate and the outcome does not depend on hidden states. Other files decide that. When they change, no run and no
# test will say so, for none of them passes here. Then somebody finds a finished module with a promise on top, and plugs
# it in. And its safety net hides the rest: if it were plugged in and broken, every answer would still be right.

# %% [markdown] tags=["zh"] pair="92a8a4-2c968e"
# 每轮的词元多，还不等于更快。两个草稿层要花 k 次前向，还要一份缓存；n-gram 几乎什么也不花。这笔账[第 12 章](ch12_acceptance.md)来算。
#
# ## 没有人调用的模块
#
# sglang PR #32881 删掉了一个文件：`python/sglang/srt/speculative/multi_layer_draft_forward_cg.py`。
# 它为多层 EAGLE 的草稿循环的一部分录制计算图。写得很用心：第一次重放要与普通路径逐位比较；一旦出了任何问题，从此改走普通路径。
# 可是没有别的文件导入它，从来没有过。
#
# 它没有造成任何损害，为什么说它是迟早要发作的缺陷？它自己的注释说，只要每步只取一个候选、结果不依赖隐藏状态，它就是对的。
# 而这由别的文件决定。那些文件一旦改了，没有哪次运行、哪项测试会提醒，因为谁也不经过这里。
# 然后有人发现了一个现成的模块，开头写着保证，就把它接上。它的安全网还会盖住剩下的问题：就算接上了而且是坏的，每个答案仍然正确。

# %%
def plain_path(x):
    return 2 * x


class Recorded:
    replays = 0

    def __call__(self, x):
        try:
            out = replay_graph(x)  # renamed elsewhere, since
            self.replays += 1
        except Exception:
            out = plain_path(x)
        return out


recorded = Recorded()
assert recorded(21) == plain_path(21)  # the answer is right
assert recorded.replays == 0  # and the fast path has never run

# %% [markdown] tags=["en"]
# Two habits help. A test of a fast path asserts that the fast path *ran*. And a module that nobody imports is found by
# a few lines:

# %% [markdown] tags=["zh"] pair="78d02c-fa7aa0"
# 两个习惯有用：快速路径的测试要断言它真的*跑过*；没有人导入的模块，几行代码就找得出来：

# %%
import ast
from pathlib import Path

import trueup.core
import trueup.models


def imported(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def unused(sources):
    """Modules among ``sources`` {name: text} that no other one imports."""
    by = {name: set(imported(text)) - {name} for name, text in sources.items()}
    return sources.keys() - set().union(*by.values())


toy = {"engine": "from draft import propose", "draft": "", "draft_graph": "import draft"}
assert unused(toy) == {"engine", "draft_graph"}  # a program begins with the engine

# %%
sources = {}
for package in (trueup.core, trueup.models):
    root = Path(package.__path__[0])
    for path in root.rglob("*.py"):
        inside = path.relative_to(root).with_suffix("").parts
        name = ".".join((package.__name__, *inside))
        sources[name.removesuffix(".__init__")] = path.read_text(encoding="utf-8")

parts = {name for name in sources if name.startswith("trueup.core.speculation.")}
assert len(parts) >= 5 and not parts & unused(sources)

# %% [markdown] tags=["en"]
# ## What engines do
#
# - sglang: the same three kinds of forward (`python/sglang/srt/speculative/`). Its extend runs all W rows of a request,
#   as here, and picks the row of the last kept token. What it carries is a tensor over the batch that every filter and
#   merge must follow.
# - vllm-ascend: plans with the lengths that hold if everything is kept, and corrects them afterwards. The row to go on
#   from is the last one less the number of rejected drafts.
# - EAGLE's papers draft *trees*: several candidates for each place. The attention of these engines on NPUs reads no
#   tree mask, so there it is always a chain.
#
# ## Exercises
#
# **1.** Run the worked example with `buckets=(4,)`. How many rows has each forward, and where do the new ones write?

# %% [markdown] tags=["zh"] pair="9758a5-0d6c4f"
# ## 真实引擎怎么做
#
# - sglang：同样的三种前向（`python/sglang/srt/speculative/`）。它的扩展也为每个请求跑满 W 行，再取最后一个保留词元的那一行。
#   它携带的是按 batch 排列的张量，每次筛选、合并都得跟着动。
# - vllm-ascend：先按“全部保留”的长度规划，事后再修正。接着打草稿的那一行，是最后一行减去被拒绝的草稿数。
# - EAGLE 的论文里，草稿是*树*：每个位置有几个候选。这些引擎在 NPU 上的注意力不读树形掩码，所以在那里总是一条链。
#
# ## 练习
#
# **1.** 用 `buckets=(4,)` 重跑上面的例子。每次前向有几行？多出来的行写到哪里？

# %% tags=["solution"]
config = EngineConfig(num_pages=7, max_requests=3, prefill_tokens=1000, buckets=(4,))
engine = Engine(target, config, ChainDrafter(ScriptedDraftModel(target), 3))
for r, length in enumerate((130, 5, 256)):
    engine.add([(i + 7 * r) % 97 for i in range(length)], SamplingParams(max_tokens=20))
engine.step()
done = engine.step()
layouts = (*done.draft_layouts[:2], done.layout, done.draft_layouts[2])
assert [layout.padded_tokens for layout in layouts] == [4, 4, 16, 16]
assert done.layout.slots[12:] == (0, 1, 2, 3)  # the dummy page
assert done.layout.segments[0].kv_lens == (134, 9, 260, 4)

# %% [markdown] tags=["en"]
# **2.** Which forwards does a round have with k = 1? And with k = 1 and a drafter without a model?

# %% [markdown] tags=["zh"] pair="915d50-9b5793"
# **2.** k = 1 时一轮有哪些前向？如果 k = 1，而且草稿器没有模型呢？

# %% tags=["solution"]
layered = ChainDrafter(ScriptedDraftModel(target), 1)
bare = ScriptedDrafter(target.expected, (1,), 1, target.vocab_size)
for drafter, forwards in ((layered, ["draft_extend"]), (bare, [])):
    engine = Engine(target, drafter=drafter)
    engine.add([1, 2, 3], SamplingParams(max_tokens=9))
    engine.step()
    done = engine.step()
    assert done.layout.segments[0].mode is Mode.VERIFY
    assert [layout.segments[0].mode.value for layout in done.draft_layouts] == forwards

# %% [markdown] tags=["en"]
# **3.** A draft vocabulary has the target's tokens 1, 4, 5 and 7 of eight. What is `d2t`? And if somebody takes its
# entries for token ids, which tokens does the head say?

# %% [markdown] tags=["zh"] pair="3915ac-e30bc2"
# **3.** 目标模型有八个词元，草稿词表包含其中的 1、4、5、7。`d2t` 是什么？如果有人把它的各项直接当作词元 id，头会说出哪些词元？

# %% tags=["solution"]
d2t = torch.tensor([1, 4, 5, 7]) - torch.arange(4)  # [Vd]
assert d2t.tolist() == [1, 3, 3, 4]  # read as ids: one right, three wrong, two of them the same

# %% [markdown] tags=["en"]
# ## On an NPU machine
#
# The same cells are meant to run there. No device has run them yet: see [what ran where](../what-ran-where.md).

# %% [markdown] tags=["zh"] pair="75fb1a-5854ff"
# ## 在 NPU 机器上
#
# 同样的单元格按设计在那里也能运行。本章还没有在任何设备上运行过，见[哪些在哪里跑过](../what-ran-where.md)。
