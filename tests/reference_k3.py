"""A second, independent Kimi: both published models as plain loops over plain tensors, in float64.

It takes what the publisher ships, the dictionary of config.json and the dictionary of tensors under their published names, and
imports nothing of the package. It was written from the published descriptions alone (Kimi Linear report, arXiv
2510.26692; Kimi K3 report, arXiv 2607.24653; Attention Residuals, arXiv 2603.15031), before the package's layers were
read, so that a misread fact in one of the two shows up as a difference.
Slow on purpose: one token, one head, one expert at once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, softplus

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def unpack_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """[out, in/2] bytes and [out, in/32] exponents -> [out, in] float64, one byte at a time."""
    out = torch.zeros(packed.shape[0], packed.shape[1] * 2, dtype=torch.float64)
    for row in range(packed.shape[0]):
        for j, byte in enumerate(packed[row].tolist()):
            for column, nibble in ((2 * j, byte & 15), (2 * j + 1, byte >> 4)):
                magnitude = E2M1[nibble & 7] * 2.0 ** (int(scale[row, column // 32]) - 127)
                out[row, column] = -magnitude if nibble & 8 else magnitude
    return out


class ReferenceKimi:
    """`tensors` may be any float dtype (computed in float64) and may require grad."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]):
        self.config = config
        self.text = config.get("text_config", config)
        self.root = "language_model." if "text_config" in config else ""
        self.tensors = tensors
        self.linear = self.text["linear_attn_config"]

    def w(self, name: str) -> Tensor:
        return self.tensors[name].double()

    def t(self, name: str) -> Tensor:
        return self.w(self.root + name)

    # ------------------------------------------------------------------ text

    def logits(self, ids: list[int], images: list[tuple[Tensor, tuple[int, int, int]]] | None = None) -> Tensor:
        """[T] ids -> [T', vocab]; each placeholder id is replaced by all features of its image (so T' >= T)."""
        table = self.t("model.embed_tokens.weight")
        features = [self.image_features(patches, grid) for patches, grid in images or []]
        rows: list[Tensor] = []
        for i in ids:
            if images is not None and i == self.config["media_placeholder_token_id"]:
                rows += list(features.pop(0))
            else:
                rows.append(table[i])
        assert not features
        hidden = self.decoder(torch.stack(rows))
        head = table if self.text.get("tie_word_embeddings") else self.t("lm_head.weight")
        return hidden @ head.T

    def decoder(self, x: Tensor) -> Tensor:
        eps = self.text["rms_norm_eps"]
        block = self.text.get("attn_res_block_size")
        bank: list[Tensor] = []
        prefix: Tensor | None = x
        for layer in range(self.text["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            assert prefix is not None
            h = self.mix([*bank, prefix], at + "self_attention_res") if block and bank else prefix
            if block and layer % block == 0:
                bank.append(prefix)
                prefix = None
            h = rms(h, self.t(at + "input_layernorm.weight"), eps)
            a = self.kda(h, at) if layer + 1 in self.linear["kda_layers"] else self.mla(h, at)
            prefix = a if prefix is None else prefix + a
            h = self.mix([*bank, prefix], at + "mlp_res") if block else prefix
            h = rms(h, self.t(at + "post_attention_layernorm.weight"), eps)
            routed = self.text.get("num_experts") and layer >= self.text["first_k_dense_replace"]
            y = self.moe(h, at + "block_sparse_moe.") if routed else self.glu_mlp(h, at + "mlp.")
            prefix = prefix + y
        assert prefix is not None
        if block:
            prefix = self.mix([*bank, prefix], "model.output_attn_res")
        return rms(prefix, self.t("model.norm.weight"), eps)

    def mix(self, sources: list[Tensor], name: str) -> Tensor:
        norm, query = self.t(name + "_norm.weight"), self.t(name + "_proj.weight")[0]
        scores = torch.stack([rms(v, norm, self.text["rms_norm_eps"]) @ query for v in sources])
        weights = torch.softmax(scores, 0)
        total = torch.zeros_like(sources[0])
        for a, v in zip(weights, sources, strict=True):
            total = total + a[:, None] * v
        return total

    def kda(self, x: Tensor, at: str) -> Tensor:
        at += "self_attn."
        H, D = self.linear["num_heads"], self.linear["head_dim"]
        q, k, v = (self.conv_silu(x @ self.t(f"{at}{n}_proj.weight").T, f"{at}{n}_conv1d.weight") for n in "qkv")
        z = x @ self.t(at + "f_a_proj.weight").T @ self.t(at + "f_b_proj.weight").T + self.t(at + "dt_bias").flatten()
        beta = torch.sigmoid(x @ self.t(at + "b_proj.weight").T)
        if self.linear.get("use_full_rank_gate"):
            gate = x @ self.t(at + "g_proj.weight").T
        else:
            gate = x @ self.t(at + "g_a_proj.weight").T @ self.t(at + "g_b_proj.weight").T
        rate = torch.exp(self.t(at + "A_log").flatten())
        bound = self.linear.get("gate_lower_bound")
        norm = self.t(at + "o_norm.weight")
        heads = []
        for h in range(H):
            part = slice(h * D, (h + 1) * D)
            S = torch.zeros(D, D, dtype=torch.float64)
            outs = []
            for t in range(x.shape[0]):
                log_decay = (
                    -rate[h] * softplus(z[t, part]) if bound is None else bound * torch.sigmoid(rate[h] * z[t, part])
                )
                qt, kt = (u[t, part] / torch.sqrt((u[t, part] ** 2).sum() + 1e-6) for u in (q, k))
                S = torch.exp(log_decay)[:, None] * S
                S = S + beta[t, h] * torch.outer(kt, v[t, part] - S.T @ kt)
                outs.append(S.T @ (qt * D**-0.5))
            o = rms(torch.stack(outs), norm, self.text["rms_norm_eps"])
            heads.append(o * torch.sigmoid(gate[:, part]))
        return torch.cat(heads, -1) @ self.t(at + "o_proj.weight").T

    def conv_silu(self, x: Tensor, name: str) -> Tensor:
        weight = self.t(name)[:, 0]  # [channels, taps], the last tap on the current token
        taps = weight.shape[1]
        rows = []
        for t in range(x.shape[0]):
            y = torch.zeros_like(x[0])
            for j in range(taps):
                if t - (taps - 1) + j >= 0:
                    y = y + weight[:, j] * x[t - (taps - 1) + j]
            rows.append(y * torch.sigmoid(y))
        return torch.stack(rows)

    def mla(self, x: Tensor, at: str) -> Tensor:
        at += "self_attn."
        c = self.text
        H, nope, rope, V = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        low_rank_eps = 1e-6  # the published code builds these two norms with its default
        if c.get("q_lora_rank"):
            low = x @ self.t(at + "q_a_proj.weight").T
            q = rms(low, self.t(at + "q_a_layernorm.weight"), low_rank_eps) @ self.t(at + "q_b_proj.weight").T
        else:
            q = x @ self.t(at + "q_proj.weight").T
        both = x @ self.t(at + "kv_a_proj_with_mqa.weight").T
        latent, shared = both[:, : c["kv_lora_rank"]], both[:, c["kv_lora_rank"] :]
        kv = rms(latent, self.t(at + "kv_a_layernorm.weight"), low_rank_eps) @ self.t(at + "kv_b_proj.weight").T
        heads = []
        for h in range(H):
            qh = q[:, h * (nope + rope) : (h + 1) * (nope + rope)]
            kvh = kv[:, h * (nope + V) : (h + 1) * (nope + V)]
            kh = torch.cat([kvh[:, :nope], shared], -1)
            rows = []
            for t in range(x.shape[0]):
                a = torch.softmax(kh[: t + 1] @ qh[t] / math.sqrt(nope + rope), 0)
                rows.append(a @ kvh[: t + 1, nope:])
            heads.append(torch.stack(rows))
        o = torch.cat(heads, -1)
        if c.get("mla_use_output_gate"):
            o = o * torch.sigmoid(x @ self.t(at + "g_proj.weight").T)
        return o @ self.t(at + "o_proj.weight").T

    def act(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.text["hidden_act"] == "silu":
            return gate * torch.sigmoid(gate) * up
        b1, b2 = self.text.get("activation_situ_beta"), self.text.get("activation_situ_linear_beta")
        b1 = 1.0 if b1 is None else b1
        return b1 * torch.tanh(gate / b1) * torch.sigmoid(gate) * (up if b2 is None else b2 * torch.tanh(up / b2))

    def glu_mlp(self, x: Tensor, at: str) -> Tensor:
        gate, up = x @ self.t(at + "gate_proj.weight").T, x @ self.t(at + "up_proj.weight").T
        return self.act(gate, up) @ self.t(at + "down_proj.weight").T

    def expert_matrix(self, name: str) -> Tensor:
        if self.root + name + ".weight" in self.tensors:
            return self.t(name + ".weight")
        at = self.root + name
        return unpack_mxfp4(self.tensors[at + ".weight_packed"], self.tensors[at + ".weight_scale"])

    def moe(self, x: Tensor, at: str) -> Tensor:
        c = self.text
        scores = torch.sigmoid(x @ self.t(at + "gate.weight").T)
        latent = c.get("routed_expert_hidden_size") is not None
        z = x @ self.t(at + "routed_expert_down_proj.weight").T if latent else x
        experts: dict[int, tuple[Tensor, ...]] = {}
        rows = []
        for t in range(x.shape[0]):
            biased = scores[t] + self.t(at + "gate.e_score_correction_bias")
            chosen = sorted(range(c["num_experts"]), key=lambda e: -biased[e].item())[: c["num_experts_per_token"]]
            p = torch.stack([scores[t, e] for e in chosen])
            if c["moe_renormalize"]:
                p = p / (p.sum() + 1e-20)
            p = p * c["routed_scaling_factor"]
            total = torch.zeros_like(z[t])
            for weight, e in zip(p, chosen, strict=True):
                if e not in experts:
                    experts[e] = tuple(self.expert_matrix(f"{at}experts.{e}.w{i}") for i in (1, 2, 3))
                w1, w2, w3 = experts[e]
                total = total + weight * (w2 @ self.act(w1 @ z[t], w3 @ z[t]))
            rows.append(total)
        u = torch.stack(rows)
        if latent:
            if c.get("latent_moe_use_norm"):
                u = rms(u, self.t(at + "routed_expert_norm.weight"), c["rms_norm_eps"])
            u = u @ self.t(at + "routed_expert_up_proj.weight").T
        return u + self.glu_mlp(x, at + "shared_experts.") if c["num_shared_experts"] else u

    # ---------------------------------------------------------------- vision

    def image_features(self, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """[t*h*w, 3, P, P] patches, rows in (frame, row, column) order -> [(h/2)(w/2), text width]."""
        c = self.config["vision_config"]
        frames, rows, columns = grid
        D, heads, eps = c["vt_hidden_size"], c["vt_num_attention_heads"], torch.finfo(torch.float32).eps
        kernel = self.w("vision_tower.patch_embed.proj.weight")
        x = patches.double().flatten(1) @ kernel.flatten(1).T
        x = x + self.positions(frames, rows, columns)
        width = c["qkv_hidden_size"] // heads
        for b in range(c["vt_num_hidden_layers"]):
            at = f"vision_tower.encoder.blocks.{b}."
            qkv = rms(x, self.w(at + "norm0.weight"), eps) @ self.w(at + "wqkv.weight").T
            qkv = qkv.view(-1, 3, heads, width)
            outs = []
            for h in range(heads):
                q, k = (self.rotate(qkv[:, i, h], rows, columns) for i in (0, 1))
                outs.append(torch.softmax(q @ k.T / math.sqrt(width), -1) @ qkv[:, 2, h])
            x = x + torch.cat(outs, -1) @ self.w(at + "wo.weight").T
            hidden = rms(x, self.w(at + "norm1.weight"), eps) @ self.w(at + "mlp.fc0.weight").T
            x = x + gelu(hidden, approximate="tanh") @ self.w(at + "mlp.fc1.weight").T
        x = rms(x, self.w("vision_tower.encoder.final_layernorm.weight"), eps)
        merged = []
        for i in range(rows // 2):
            for j in range(columns // 2):
                corner = [(2 * i + a) * columns + 2 * j + b for a in (0, 1) for b in (0, 1)]
                merged.append(
                    torch.cat([sum(x[f * rows * columns + n] for f in range(frames)) / frames for n in corner])
                )
        y = gelu(torch.stack(merged) @ self.w("mm_projector.proj.0.weight").T)
        y = y @ self.w("mm_projector.proj.2.weight").T
        assert y.shape[1] == self.text["hidden_size"] and x.shape[1] == D
        return rms(y, self.w("mm_projector.post_norm.weight"), c["projector_ln_eps"])

    def positions(self, frames: int, rows: int, columns: int) -> Tensor:
        table = self.w("vision_tower.patch_embed.pos_emb.weight")
        D = table.shape[-1]
        space = torch.stack([bilinear(table, i, j, rows, columns) for i in range(rows) for j in range(columns)])
        out = []
        for f in range(frames):
            omega = torch.tensor([10000.0 ** (-i / (D // 2)) for i in range(D // 2)], dtype=torch.float64)
            time = (
                torch.cat([torch.sin(f * omega), torch.cos(f * omega)]) if frames > 1 else torch.zeros_like(table[0, 0])
            )
            out.append(space + time)
        return torch.cat(out)

    def rotate(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """Adjacent pairs: an even pair turns with the column, an odd pair with the row."""
        width = x.shape[1]
        out = torch.empty_like(x)
        for n in range(x.shape[0]):
            row, column = (n // columns) % rows, n % columns
            for pair in range(width // 2):
                angle = (column if pair % 2 == 0 else row) * 10000.0 ** (-4 * (pair // 2) / width)
                a, b = x[n, 2 * pair], x[n, 2 * pair + 1]
                out[n, 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
                out[n, 2 * pair + 1] = a * math.sin(angle) + b * math.cos(angle)
        return out


def bilinear(table: Tensor, i: int, j: int, rows: int, columns: int) -> Tensor:
    """Entry (i, j) of `table` [R, C, D] resampled to rows x columns; pixel centres, clamped at the border."""
    R, C = table.shape[:2]
    y = max((i + 0.5) * R / rows - 0.5, 0.0)
    x = max((j + 0.5) * C / columns - 0.5, 0.0)
    y0, x0 = int(y), int(x)
    y1, x1 = min(y0 + 1, R - 1), min(x0 + 1, C - 1)
    fy, fx = y - y0, x - x0
    top = (1 - fx) * table[y0, x0] + fx * table[y0, x1]
    return (1 - fy) * top + fy * ((1 - fx) * table[y1, x0] + fx * table[y1, x1])
