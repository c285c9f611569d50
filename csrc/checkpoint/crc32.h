#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace smp::checkpoint {

/// Returns the CRC-32 of zip files (polynomial 0xEDB88320, reflected) of
/// `bytes`, continuing from `crc`. Pure. One checksum serves the manifest and
/// the zip records inside of a file, and Python's zlib can check it.
///
/// Hardware: carry-less multiplication on x86, CRC instructions on ARM; a table
/// elsewhere. Source: V. Gopal et al., "Fast CRC Computation for Generic
/// Polynomials Using PCLMULQDQ Instruction", Intel 2009, whose constants for
/// this polynomial are used.
uint32_t crc32(std::span<const std::byte> bytes, uint32_t crc = 0);

/// Returns the same by table only, to compare the hardware with.
uint32_t crc32_by_table(std::span<const std::byte> bytes, uint32_t crc = 0);

/// Returns the CRC-32 of two texts after each other, from those of the texts.
/// Pure.
/// Source: M. Adler, zlib 1.2.12, crc32_combine: multiplies `first` by x^(8 *
/// second_bytes) modulo the polynomial.
uint32_t crc32_combine(uint32_t first, uint32_t second, uint64_t second_bytes);

}  // namespace smp::checkpoint
