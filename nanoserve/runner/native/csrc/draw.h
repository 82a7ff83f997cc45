// Drawing tokens from rows of logits: what runner/draw.py does in torch, in the same order, row by row.
#pragma once
#include "gemm.h"
#include "model.h"
#include "team.h"

namespace ns {

// One token for a row, whose largest logit is known (index -1: there is none), or for each; see NsDraw. A row's token
// depends on nothing but the row.
void draw_token(const NsDraw& draw, int row, const Best& top);
void draw_tokens(const NsDraw& draw, Team* team);

}  // namespace ns
