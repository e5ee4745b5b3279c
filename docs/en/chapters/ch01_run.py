# ---
# title:
#   en: "1. Run it in a minute"
#   zh: "1. 一分钟跑起来"
# outcome:
#   en: a model that writes text on your machine, and a first look at what one step of its engine computes
#   zh: 一个在你的机器上写出文字的模型，并且第一次看清引擎的一步到底算了什么
# minutes: 6
# prerequisites:
#   en: Python; a rough idea of what a language model does
#   zh: 会 Python，大致知道语言模型做什么
# bugs: []
# hardware:
#   en: any laptop; the same cells run on an NPU machine
#   zh: 任何笔记本电脑；同样的单元格也能在 NPU 机器上运行
# ---

# %% [markdown] tags=["en"]
# **The claim.** Serving a model on an Ascend NPU is a sequence of calls to fused operators. Every one of these
# calls can be made, checked and understood on a laptop. trueup makes exactly the calls that an NPU machine makes,
# `torch.ops.npu.*`, and here a reference kernel answers them.
#
# The package brings a small trained model, so nothing has to be downloaded.

# %% [markdown] tags=["zh"] pair="e2d6ad-cfbeab"
# **要点。** 在昇腾 NPU 上提供模型服务，就是一连串融合算子的调用。这些调用，每一个都可以在笔记本电脑上发出、检查并弄懂。
# trueup 发出的正是 NPU 机器上的那些调用，即 `torch.ops.npu.*`；在这里，回答它们的是参考内核。
#
# 软件包自带一个训练好的小模型，所以什么都不用下载。

# %%
from trueup.core.sampling import SamplingParams
from trueup.models import LLM

llm = LLM.from_pretrained("glm-4.7-flash-nano", progress=False)
prompts = ["import os\nimport sys\n\ndef main(", "class Stack:\n    def __init__(self", "for name in sorted("]
completions = llm.generate(prompts, SamplingParams(max_tokens=24))

print(completions[1].prompt + completions[1].text)
assert all(len(completion.token_ids) >= 1 for completion in completions)

# %% [markdown] tags=["en"]
# The text looks like Python and means little: the model has a few million parameters. It is shaped like
# GLM-4.7-Flash, though, and runs through the same code.
#
# ## One step, looked at
#
# The engine works in *rounds*. In each round it decides which requests run, plans one forward, runs it, and gives
# every request its next token. `Engine.step()` returns what it did. Let us add three requests and look at two rounds.

# %% [markdown] tags=["zh"] pair="efdeb0-dfd059"
# 这段文字看上去像 Python，却没有多少意思：模型只有几百万个参数。不过它的结构与 GLM-4.7-Flash 相同，走的也是同一份代码。
#
# ## 细看一步
#
# 引擎按*轮*工作。每一轮它决定运行哪些请求，规划一次前向，执行，然后给每个请求下一个词元。`Engine.step()` 返回它做了什么。
# 我们加入三个请求，看其中两轮。

# %%
engine = llm.engine
params = SamplingParams(max_tokens=8, ignore_eos=True)
ids = [engine.add(llm.tokenizer.encode(prompt), params) for prompt in prompts]
first, second = engine.step(), engine.step()

for done in (first, second):
    layout = done.layout
    modes = [segment.mode.value for segment in layout.segments]
    print(f"round {done.number}: {modes}, requests {layout.real_requests} of {layout.padded_requests}, "
          f"token rows {layout.real_tokens} of {layout.padded_tokens}")

assert first.layout.real_tokens == sum(len(llm.tokenizer.encode(prompt)) for prompt in prompts)
assert (second.layout.real_requests, second.layout.padded_requests) == (3, 4)

# %% [markdown] tags=["en"]
# The first round ran the three prompts, all their tokens as rows of one matrix. The second round ran one token a
# request: three rows. But it computed **four**. Graphs on an NPU are recorded for a few batch sizes (*buckets*), here
# 1, 2, 4 and 8, so three requests run in the graph for four. This picture shows the second round's layout; the dashed
# boxes are padding.

# %% [markdown] tags=["zh"] pair="06978e-4cf0de"
# 第一轮运行了三个提示词，它们的全部词元是同一个矩阵的行。第二轮每个请求只有一个词元，即三行；但它算了**四**行。
# NPU 上的图是按少数几种批大小（*桶*）录制的，这里是 1、2、4、8，所以三个请求在为四个请求录制的图里运行。
# 下图是第二轮的布局，虚线框是填充。

# %% tags=["fold"]
from trueup.core.picture import boxes

segment = second.layout.segments[0]
style = ["real" if request is not None else "pad" for request in segment.requests]


def row(label, values):
    return label, [(str(value), s) for value, s in zip(values, style, strict=True)]


names = ["dummy" if request is None else f"#{request}" for request in segment.requests]
boxes([row("request [Bp]", names), row("query rows", segment.q_lens), row("kv length", segment.kv_lens),
       row("position [Tp]", segment.positions), row("slot [Tp]", segment.slots)],
      "Three decoding requests, padded to four: the fourth is an ordinary request on the dummy page.")

# %% [markdown] tags=["en"]
# `Bp` is the padded number of requests, `Tp` that of token rows. A *slot* is the place of one token's cache row: page
# number times page size plus offset. Page 0 is the *dummy page*: no request owns it, and padding writes there.

# %% [markdown] tags=["zh"] pair="f8fb1e-82cfcd"
# `Bp` 是填充后的请求数，`Tp` 是填充后的词元行数。*槽位*（slot）是一个词元的缓存行所在的位置：页号乘页大小再加页内偏移。
# 第 0 页是*哑页*：没有请求拥有它，填充写在那里。

# %%
page_size = second.layout.page_size
assert segment.requests[3] is None and segment.slots[3] // page_size == 0
assert all(slot // page_size != 0 for slot in segment.slots[:3])
assert segment.q_cum[-1] == second.layout.padded_tokens == 4

# %% [markdown] tags=["en"]
# ## The wrong way
#
# What if a tensor does not fit the others? On a device this ends in an error code from deep inside a kernel, or in a
# wrong number. Here every operator checks its *contract* first. A norm over 8 channels with 7 weights:

# %% [markdown] tags=["zh"] pair="795908-49a90b"
# ## 错误的做法
#
# 如果一个张量与其他张量对不上呢？在设备上，结果是内核深处的一个错误码，或者一个错误的数。在这里，每个算子先检查自己的*合约*。
# 对 8 个通道做归一化，却给了 7 个权重：

# %% tags=["raises-exception"] raises="ContractError" says="gamma"
import torch

x = torch.randn(3, 8)  # [T, H]
torch.ops.npu.npu_rms_norm(x, torch.ones(7))

# %% [markdown] tags=["en"]
# The message names the operator, the argument, what it got and what it expected, and where the rule is written. With
# 8 weights the call is right, and its result is what the formula says.

# %% [markdown] tags=["zh"] pair="c05d38-f523ae"
# 这条消息说出了算子、参数、收到的和期望的内容，以及规则写在哪里。给 8 个权重，调用就对了，结果与公式一致。

# %%
y, rstd = torch.ops.npu.npu_rms_norm(x, torch.ones(8))  # [T, H], [T, 1]
expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()  # [T, H]
assert torch.allclose(y, expected, atol=1e-5)

# %% [markdown] tags=["en"]
# ## The company a request keeps
#
# A padded row must not change a real one, and neither may a neighbour. So a request's tokens are the same alone and
# in a batch. This is the oldest test of a serving engine, and it finds a great many bugs.

# %% [markdown] tags=["zh"] pair="19be68-e377e7"
# ## 请求与它的同伴
#
# 填充行不能改变真实行，邻居也不能。所以一个请求单独运行和在批里运行，得到的词元相同。这是服务引擎最古老的测试，能找出许多缺陷。

# %%
greedy = SamplingParams(max_tokens=12)
together = [completion.token_ids for completion in llm.generate(prompts, greedy)]
alone = [llm.generate(prompt, greedy)[0].token_ids for prompt in prompts]
assert together == alone

# %% [markdown] tags=["en"]
# ## Exercises
#
# **1.** How many padded rows does a round with five decoding requests have?

# %% [markdown] tags=["zh"] pair="2411d3-80e68c"
# ## 练习
#
# **1.** 五个请求在解码的一轮里，有多少行是填充？

# %% tags=["solution"]
five = [engine.add([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True)) for _ in range(5)]
while engine.has_work:
    done = engine.step()
assert done.layout.real_requests == 5
assert done.layout.padded_tokens - done.layout.real_tokens == 3  # the bucket is 8

# %% [markdown] tags=["en"]
# **2.** Where do the cache rows of a finished request go?

# %% [markdown] tags=["zh"] pair="09eb2c-520bbc"
# **2.** 请求结束后，它的缓存行到哪里去了？

# %% [markdown] tags=["en", "solution"]
# Nowhere: its pages are free again, and the rows in them stay until another request writes over them.

# %% [markdown] tags=["zh", "solution"] pair="ec7af9-fa3156"
# 哪儿也没去：它的页重新变为空闲，其中的行一直留着，直到别的请求覆盖它们。

# %% tags=["solution"]
assert engine.pages.free == engine.config.num_pages - 1  # all but the dummy page

# %% [markdown] tags=["en"]
# ## On an NPU machine
#
# The same cells run there unchanged: install `torch_npu` beside the packages, open this notebook, run all cells.
# `trueup doctor` says which kernels answer. No device has run this chapter yet; [what ran where](../what-ran-where.md)
# keeps the account.

# %% [markdown] tags=["zh"] pair="2c8677-ca6a6c"
# ## 在 NPU 机器上
#
# 同样的单元格在那里原样运行：除这些软件包外再装上 `torch_npu`，打开这个笔记本，运行全部单元格。
# `trueup doctor` 会说出由哪些内核回答。还没有设备运行过这一章；[哪些在哪里跑过](../what-ran-where.md)一页记着账。
