// AMX's tiles: eight a thread, of sixteen rows of 64 bytes, which is how all kernels here configure them.
#pragma once

namespace emulated {

struct alignas(64) Tile {
    std::uint8_t rows[16][64];
};

// As LDTILECFG reads it.
struct TileLayout {
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t row_bytes[16];
    std::uint8_t rows[16];
};

inline thread_local Tile tiles[8];
inline thread_local bool has_tiles = false;

inline Tile& tile(int index) {
    demand(has_tiles);
    return tiles[index];
}

// The element `k` of a row, in all lanes.
inline Ints everywhere(const Tile& tile, int row, int k) { return Ints{} + load<std::int32_t>(tile.rows[row] + 4 * k); }

}  // namespace emulated

inline void _tile_loadconfig(const void* config) {
    const auto layout = emulated::load<emulated::TileLayout>(config);
    emulated::demand(layout.palette == 1 && layout.start_row == 0);
    for (int i = 0; i < 8; ++i) {
        emulated::demand(layout.row_bytes[i] == 64 && layout.rows[i] == 16);
    }
    emulated::has_tiles = true;
}

inline void _tile_release() { emulated::has_tiles = false; }

inline void _tile_zero(int index) { emulated::tile(index) = {}; }

inline void _tile_loadd(int index, const void* source, std::int64_t stride) {
    for (int row = 0; row < 16; ++row) {
        std::memcpy(emulated::tile(index).rows[row], static_cast<const char*>(source) + row * stride, 64);
    }
}

inline void _tile_stored(int index, void* place, std::int64_t stride) {
    for (int row = 0; row < 16; ++row) {
        std::memcpy(static_cast<char*>(place) + row * stride, emulated::tile(index).rows[row], 64);
    }
}

inline void _tile_dpbf16ps(int sums, int left, int right) {
    for (int row = 0; row < 16; ++row) {
        __m512 evens{}, odds{};
        for (int k = 0; k < 16; ++k) {
            const auto x = (__m512bh)emulated::everywhere(emulated::tile(left), row, k);
            const auto y = emulated::load<__m512bh>(emulated::tile(right).rows[k]);
            evens = _mm512_fmadd_ps(emulated::evens(x), emulated::evens(y), evens);
            odds = _mm512_fmadd_ps(emulated::odds(x), emulated::odds(y), odds);
        }
        void* place = emulated::tile(sums).rows[row];
        emulated::store(place, emulated::load<__m512>(place) + (evens + odds));
    }
}

inline void _tile_dpbssd(int sums, int left, int right) {
    for (int row = 0; row < 16; ++row) {
        void* place = emulated::tile(sums).rows[row];
        auto total = emulated::load<emulated::Ints>(place);
        for (int k = 0; k < 16; ++k) {
            const auto y = emulated::load<emulated::Ints>(emulated::tile(right).rows[k]);
            total = emulated::add_products(total, emulated::everywhere(emulated::tile(left), row, k), y, true);
        }
        emulated::store(place, total);
    }
}
