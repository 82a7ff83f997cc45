// Tiles of products with integer weights (kU4, kU8 of gemm.h).
#pragma once
#include "epilogue.h"

namespace ns {

// Rows in one register tile: 6 x 2 sums of integers and as many of floats, 4 weights, a mask and a broadcast.
constexpr int kIntegerTileRows = 6;

TileFunction integer_tile_function(int format, int rows);

}  // namespace ns
