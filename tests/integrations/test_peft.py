"""The real PEFT, on models made from configs: what is read from its adapters, and what they do once it is loaded again.

`make test-peft` runs it in an environment of its own, as PEFT brings transformers and accelerate along.
"""

import copy
import os

import pytest
import torch
from torch import nn

from manifoldagg import ParameterSpace, Server, UpdateInfo, aggregate, average_adapters
from manifoldagg.federated.rules import FedAsync, FedAvg
from manifoldagg.manifolds.lora.scaling import ScaledModule, resolve_scalings

os.environ["HF_HUB_OFFLINE"] = "1"
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
# What others warn of is theirs.
pytestmark = pytest.mark.filterwarnings("default")

WORDS = 61
EPS = 2.0**-23


@pytest.fixture(scope="module")
def llama():
    """A language model of two layers, without weights of anybody's."""
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config).eval()


class Mixed(nn.Module):
    """An embedding, a convolution, a linear layer and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 12)
        self.conv = nn.Conv1d(12, 10, 3)
        self.linear = nn.Linear(10, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        x = self.conv(self.embedding(tokens).mT).mT.tanh()
        return self.head(self.linear(x).tanh().mean(1))


@pytest.fixture(scope="module")
def mixed():
    torch.manual_seed(1)
    return Mixed().eval()


def adapted(base, rank, **options):
    """A copy of a model with an adapter that has learned nothing yet."""
    torch.manual_seed(2)
    return peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=rank, **options)).eval()


def tokens(seed):
    return torch.randint(WORDS, (4, 9), generator=torch.Generator().manual_seed(seed))


def output(model, seed=99):
    with torch.no_grad():
        found = model(tokens(seed))
    return getattr(found, "logits", found)


def trained(model, seed, start=None, steps=3):
    """The state dict of a client's adapter after a few steps from another, or from its own."""
    if start is not None:
        load(model, start)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    goals = torch.Generator().manual_seed(seed)
    for step in range(steps):
        found = model(tokens(seed + step))
        found = getattr(found, "logits", found)
        loss = nn.functional.mse_loss(found, torch.randn(found.shape, generator=goals))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return state_of(model)


def state_of(model):
    return {name: x.clone() for name, x in peft.get_peft_model_state_dict(model, save_embedding_layers=False).items()}


def load(model, state):
    found = peft.set_peft_model_state_dict(model, state)
    assert not found.unexpected_keys
    return model


def merged(model, state):
    """The dense weights that an adapter makes."""
    return load(copy.deepcopy(model), state).merge_and_unload().state_dict()


def dense(base, states, weights):
    """The model with the average of dense weights."""
    found = copy.deepcopy(base)
    found.load_state_dict(
        {n: sum(w * s[n].double() for w, s in zip(weights, states, strict=True)).float() for n in states[0]}
    )
    return found


def near(a, b, plain):
    """Equal, in roundings of what adapters change."""
    return (a - b).norm() <= 100 * EPS * a.norm() and (a - plain).norm() > 1e-2 * a.norm()


TARGETS = ["q_proj", "v_proj", "down_proj"]


def test_the_mean_of_two_trained_adapters_is_that_of_their_dense_weights(llama):
    clients = [
        adapted(llama, 4, lora_alpha=8, target_modules=TARGETS),
        adapted(llama, 4, lora_alpha=8, target_modules=TARGETS),
    ]
    states = [trained(model, seed) for seed, model in enumerate(clients)]
    expected = output(dense(llama, [merged(m, s) for m, s in zip(clients, states, strict=True)], [0.25, 0.75]))
    server = adapted(llama, 8, lora_alpha=16, target_modules=TARGETS)
    mean, info = average_adapters(states, [1, 3], 8, return_info=True)
    assert info.error <= 1e-6
    assert near(output(load(server, mean)), expected, output(llama))
    apart = {name: 0.25 * states[0][name] + 0.75 * states[1][name] for name in states[0]}
    off = output(load(clients[0], apart)) - expected
    assert off.norm() > 0.05 * (expected - output(llama)).norm()


def test_server_accepts_clients_with_other_ranks_and_scalings(llama):
    """Ranks, alphas and rank-stabilised scalings that differ, read from the configs of the models."""
    mine = adapted(llama, 8, lora_alpha=4, target_modules=TARGETS, use_rslora=True)
    options = [{"r": 2, "lora_alpha": 8}, {"r": 6, "lora_alpha": 9, "alpha_pattern": {"v_proj": 3}}]
    clients = [adapted(llama, o.pop("r"), target_modules=TARGETS, **o) for o in options]
    states = [trained(model, seed) for seed, model in enumerate(clients)]
    start = state_of(mine)
    space = ParameterSpace.of_state_dict(start, adapters=True, scaling=mine.peft_config["default"])
    server = Server(space, FedAvg(2), space.point(start), weights={0: 1, 1: 3})
    for i, (model, state) in enumerate(zip(clients, states, strict=True)):
        ticket = server.dispatch(i)
        receipt = server.receive_model(ticket, state, samples=1 + 2 * i, scaling=model.peft_config["default"])
        assert receipt.accepted, receipt.reason
    expected = output(dense(llama, [merged(m, s) for m, s in zip(clients, states, strict=True)], [0.25, 0.75]))
    assert near(output(load(mine, server.state_dict())), expected, output(llama))


def test_aggregated_adapters_equal_aggregated_dense_weights(llama):
    """Two rounds from what came back: it can be trained, and the server's model is what dense arithmetic says."""
    model = adapted(llama, 8, lora_alpha=8, target_modules=TARGETS)
    config = model.peft_config["default"]
    current, state, exact = state_of(model), None, merged(model, state_of(model))
    space = ParameterSpace.of_state_dict(current, adapters=True, scaling=config)
    for seed in range(2):
        update = trained(model, seed, start=current)
        exact = {n: 0.5 * x + 0.5 * merged(model, update)[n] for n, x in exact.items()}
        rule = FedAsync(0.5)
        current, state, numbers = aggregate(rule, state, current, current, update, space=space)
        assert numbers["norm"] > 0
    lost = dense(llama, [exact], [1.0])
    # In the second round a matrix of rank 16 comes to rank 8.
    assert (output(load(model, current)) - output(lost)).norm() <= 0.2 * (output(lost) - output(llama)).norm()


@pytest.mark.parametrize("bias", [False, True])
def test_adapters_of_embeddings_convolutions_biases_and_heads_are_averaged(mixed, bias):
    targets = ["embedding", "conv", "linear"] if not bias else ["conv", "linear"]
    options = {"lora_alpha": 6, "target_modules": targets, "modules_to_save": ["head"], "lora_bias": bias}
    clients = [adapted(mixed, 2, **options), adapted(mixed, 3, **options)]
    states = [trained(model, seed) for seed, model in enumerate(clients)]
    server = adapted(mixed, 5, **options)
    own = state_of(server)
    current, rule = own, FedAsync(1.0)
    first, second = (model.peft_config["default"] for model in clients)
    config = server.peft_config["default"]
    space = ParameterSpace.of_state_dict(own, adapters=True, scaling=config)
    current, _, _ = aggregate(rule, None, own, own, states[0], info=UpdateInfo(scaling=first), space=space)
    assert near(output(load(server, current)), output(load(clients[0], states[0])), output(mixed))
    current, _, _ = aggregate(
        FedAsync(0.75), None, current, own, states[1], info=UpdateInfo(scaling=second), space=space
    )
    expected = output(dense(mixed, [merged(m, s) for m, s in zip(clients, states, strict=True)], [0.25, 0.75]))
    assert near(output(load(server, current)), expected, output(mixed))


def test_dora_magnitudes_are_averaged(mixed):
    options = {"lora_alpha": 4, "target_modules": ["linear"], "use_dora": True}
    clients = [adapted(mixed, 2, **options) for _ in range(2)]
    states = [trained(model, seed, steps=6) for seed, model in enumerate(clients)]
    mean = average_adapters(states, None, 4)
    server = load(adapted(mixed, 4, lora_alpha=8, target_modules=["linear"], use_dora=True), mean)
    magnitude = "base_model.model.linear.lora_magnitude_vector"
    weight = mixed.linear.weight.detach()
    for x in states:
        weight = (
            weight + 0.5 * 2 * x["base_model.model.linear.lora_B.weight"] @ x["base_model.model.linear.lora_A.weight"]
        )
    expected = copy.deepcopy(mixed)
    scale = (states[0][magnitude] + states[1][magnitude]) / 2 / weight.norm(dim=1)
    expected.linear.weight.data = scale[:, None] * weight
    assert near(output(server), output(expected), output(mixed))


def test_half_precision_adapters_keep_their_dtype(llama):
    model = adapted(llama, 4, lora_alpha=8, target_modules=TARGETS)
    states = [trained(model, seed) for seed in range(2)]
    narrow = [{name: x.bfloat16() for name, x in state.items()} for state in states]
    mean, _, _ = aggregate(
        FedAsync(1.0), None, *narrow[:1] * 2, narrow[1], space=ParameterSpace.of_state_dict(narrow[0], adapters=True)
    )
    assert {x.dtype for x in mean.values()} == {torch.bfloat16}
    a, b = (output(load(model, {n: x.float() for n, x in state.items()})) for state in (mean, narrow[1]))
    assert (a - b).norm() <= 2.0**-6 * b.norm()


@pytest.mark.parametrize(
    "options",
    [
        {"lora_alpha": 5},
        {"lora_alpha": 5, "use_rslora": True},
        {"lora_alpha": 5, "alpha_pattern": {"v_proj": 7, r"layers\.1\.self_attn\.q_proj": 2}},
        {"lora_alpha": 5, "rank_pattern": {"q_proj": 2, "model.layers.0.mlp.down_proj": 6}},
        {"lora_alpha": 5, "rank_pattern": {r".*layers\.0.*": 2}, "alpha_pattern": {"down_proj": 1}, "use_rslora": True},
        {"lora_alpha": 5, "rank_pattern": {"^model.layers.0.self_attn.v_proj": 3}},
    ],
)
def test_scalings_equal_those_of_peft(llama, options):
    model = adapted(llama, 4, target_modules=TARGETS, **options)
    state = state_of(model)
    config = model.peft_config["default"]
    pairs = []
    own = []
    for name, module in model.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            pairs.append(ScaledModule(name, state[f"{name}.lora_A.weight"].shape[0]))
            own.append(module.scaling["default"])
    assert len(pairs) == 6
    assert resolve_scalings(config, pairs) == own
    assert resolve_scalings(config.to_dict(), pairs) == own
    space = ParameterSpace.of_state_dict(state, adapters=True, scaling=config)
    assert [pair.scaling for pair in space.adapters.factors] == [
        dict(zip([p.name for p in pairs], own, strict=True))[pair.pair.module_name] for pair in space.adapters.factors
    ]


def test_adapters_in_a_module_are_found_by_name(llama):
    model = adapted(llama, 4, lora_alpha=8, target_modules=TARGETS)
    state = {name: x for name, x in model.state_dict().items() if "lora_" in name}
    assert all(".default." in name for name in state)
    space = ParameterSpace.of_state_dict(state, adapters=True, scaling=model.peft_config["default"])
    assert [*space.state_dict(space.point(state))] == [*state]
    assert len(space.manifolds) == 6


@pytest.mark.parametrize("kind", ["LoHaConfig", "IA3Config", "AdaLoraConfig", "VeraConfig", "OFTConfig"])
def test_unsupported_adapters_are_rejected(mixed, kind):
    options = {
        "IA3Config": {"feedforward_modules": []},
        "AdaLoraConfig": {"total_step": 10},
        "OFTConfig": {"oft_block_size": 2},
    }
    config = getattr(peft, kind)(target_modules=["linear"], **options.get(kind, {}))
    state = peft.get_peft_model_state_dict(peft.get_peft_model(copy.deepcopy(mixed), config))
    with pytest.raises(ValueError, match="another kind of adapter|expected pairs"):
        ParameterSpace.of_state_dict(dict(state), adapters=True)
