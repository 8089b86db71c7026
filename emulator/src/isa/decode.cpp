#include "isa/decode.h"

#include <bit>
#include <cstring>
#include <string>

#include "isa/signatures.h"

namespace emulator {
namespace {

bool starts_with(const char* text, const char* prefix) {
    return std::strncmp(text, prefix, std::strlen(prefix)) == 0;
}

bool ends_with(const std::string& text, const char* suffix) {
    const size_t n = std::strlen(suffix);
    return text.size() >= n && text.compare(text.size() - n, n, suffix) == 0;
}

uint64_t inline_float(int encoding, Type type) {
    // 240..248: 0.5 -0.5 1 -1 2 -2 4 -4 1/(2 pi)
    static constexpr double values[] = {0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0};
    static constexpr uint16_t halves[] = {0x3800, 0xb800, 0x3c00, 0xbc00, 0x4000,
                                          0xc000, 0x4400, 0xc400, 0x3118};
    const int i = encoding - 240;
    switch (type) {
        case Type::b16:
        case Type::f16:
        case Type::pk16:
        case Type::pkf16:
            return halves[i];
        case Type::f64:
            return i == 8 ? 0x3fc45f306dc9c882ull : std::bit_cast<uint64_t>(values[i]);
        default: {
            const uint32_t bits =
                i == 8 ? 0x3e22f983u : std::bit_cast<uint32_t>(static_cast<float>(values[i]));
            return type == Type::pkf32 ? static_cast<uint64_t>(bits) << 32 | bits : bits;
        }
    }
}

class Decoder {
   public:
    Decoder(const uint8_t* data, size_t bytes) : data_(data), bytes_(bytes) {}

    Inst next(uint32_t offset) {
        inst_ = Inst{};
        inst_.offset = offset;
        offset_ = offset;
        w0_ = word(0);
        literal_at_ = 1;
        const uint32_t w = w0_;
        if (w >> 26 == 0b110000)
            smem();
        else if (w >> 26 == 0b110110)
            ds();
        else if (w >> 26 == 0b111000)
            mubuf();
        else if (w >> 26 == 0b111010)
            known(Format::mtbuf, w >> 15 & 15), inst_.bytes = 8;
        else if (w >> 26 == 0b110111)
            flat();
        else if (w >> 23 == 0b110100111)
            vop3p();
        else if (w >> 26 == 0b110100)
            vop3();
        else if (w >> 23 == 0b101111101)
            sop1();
        else if (w >> 23 == 0b101111110)
            sopc();
        else if (w >> 23 == 0b101111111)
            sopp();
        else if (w >> 28 == 0b1011)
            sopk();
        else if (w >> 30 == 0b10)
            sop2();
        else if (w >> 25 == 0b0111110)
            vopc();
        else if (w >> 25 == 0b0111111)
            vop1();
        else if (w >> 31 == 0)
            vop2();
        if (inst_.name[0] == 0 || offset + inst_.bytes > bytes_) {
            inst_ = Inst{};
            inst_.offset = offset;
            inst_.name = "(invalid)";
        }
        return inst_;
    }

   private:
    uint32_t word(int i) const {
        uint32_t value = 0;
        const size_t at = offset_ + 4 * i;
        if (at + 4 <= bytes_) std::memcpy(&value, data_ + at, 4);
        return value;
    }

    // Sets name, op and unit; true when operands should be decoded.
    bool known(Format format, uint32_t opcode) {
        const Encoded& found = encoded(format, opcode);
        inst_.format = format;
        inst_.name = found.name ? found.name : "";
        inst_.op = found.op;
        signature_ = &signatures()[static_cast<int>(found.op)];
        if (found.op == Op::unknown) {
            // Still right in listings, counters and static checks by pipe.
            inst_.unit = starts_with(inst_.name, "s_") ? Unit::salu : Unit::valu;
            if (starts_with(inst_.name, "v_mfma") || starts_with(inst_.name, "v_smfmac"))
                inst_.unit = Unit::mfma;
            if (format == Format::smem) inst_.unit = Unit::smem;
            if (format == Format::ds) inst_.unit = Unit::ds;
            if (format >= Format::mubuf) inst_.unit = Unit::vmem;
            return false;
        }
        inst_.unit = signature_->unit;
        inst_.reads_dst = signature_->reads_dst;
        inst_.reads_scc = signature_->reads_scc;
        inst_.writes_scc = signature_->writes_scc;
        inst_.writes_exec = signature_->writes_exec;
        return true;
    }

    Operand scalar(uint32_t index, Type type) const {
        return {.kind = Kind::scalar,
                .type = type,
                .dwords = dwords_of(type),
                .index = static_cast<uint16_t>(index)};
    }
    Operand vector(uint32_t index, Type type) const {
        return {.kind = Kind::vector,
                .type = type,
                .dwords = dwords_of(type),
                .index = static_cast<uint16_t>(index)};
    }
    Operand vector(uint32_t index, int dwords, bool acc) const {
        Operand operand = vector(index + (acc ? 256 : 0), Type::b32);
        operand.dwords = static_cast<uint8_t>(dwords);
        return operand;
    }
    Operand scalars(uint32_t index, int dwords) const {
        Operand operand = scalar(index, Type::b32);
        operand.dwords = static_cast<uint8_t>(dwords);
        return operand;
    }

    // A 9-bit (vector) or 8-bit (scalar) source field.
    Operand source(uint32_t field, Type type) {
        if (field >= 256) return vector(field - 256, type);
        if (field < 128) return scalar(field, type);
        Operand operand{.kind = Kind::constant, .type = type, .dwords = 0};
        const bool wide = type == Type::b64 || type == Type::s64 || type == Type::m64;
        if (field <= 192) {
            operand.value = field - 128;
        } else if (field <= 208) {
            const int64_t value = 192 - static_cast<int64_t>(field);
            operand.value = wide ? static_cast<uint64_t>(value) : static_cast<uint32_t>(value);
            if (type == Type::f64) operand.value = static_cast<uint64_t>(value);
        } else if (field >= 240 && field <= 248) {
            // A 64-bit integer operand takes the double, as hardware does.
            operand.value = inline_float(field, wide ? Type::f64 : type);
        } else if (field == 255) {
            const uint32_t literal = word(literal_at_);
            inst_.bytes = static_cast<uint8_t>(4 * literal_at_ + 4);
            if (type == Type::f64)
                operand.value = static_cast<uint64_t>(literal) << 32;
            else if (wide && inst_.format <= Format::sopp)
                operand.value =
                    static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(literal)));
            else
                operand.value = literal;
        } else {
            operand.kind = Kind::special;
            operand.dwords =
                dwords_of(type);  // a 64-bit read of an aperture has it in the high half
            operand.index = static_cast<uint16_t>(field);
        }
        return operand;
    }

    Operand vcc() const { return scalar(kVcc, Type::m64); }

    void set_dst(int i, Operand operand) { inst_.dst[i] = operand; }
    bool has_dst() const { return !signature_->dst.empty(); }

    void branch_target() {
        const char* name = inst_.name;
        if (!starts_with(name, "s_branch") && !starts_with(name, "s_cbranch") &&
            !starts_with(name, "s_call"))
            return;
        inst_.target = static_cast<int32_t>(offset_) + 4 + inst_.imm * 4;  // bytes; resolved later
    }

    void sop1() {
        if (!known(Format::sop1, w0_ >> 8 & 255)) return literal_only(w0_ & 255);
        if (has_dst()) set_dst(0, scalar(w0_ >> 16 & 127, signature_->dst[0]));
        if (!signature_->src.empty()) inst_.src[0] = source(w0_ & 255, signature_->src[0]);
    }

    void sop2() {
        if (!known(Format::sop2, w0_ >> 23 & 127)) {
            literal_only(w0_ & 255);
            return literal_only(w0_ >> 8 & 255);
        }
        if (has_dst()) set_dst(0, scalar(w0_ >> 16 & 127, signature_->dst[0]));
        for (size_t i = 0; i < signature_->src.size(); ++i)
            inst_.src[i] = source(w0_ >> 8 * i & 255, signature_->src[i]);
    }

    void sopk() {
        const bool found = known(Format::sopk, w0_ >> 23 & 31);
        inst_.imm = static_cast<int16_t>(w0_);
        if (inst_.name == std::string("s_setreg_imm32_b32")) {
            inst_.bytes = 8;
            if (found) inst_.src[0] = source(255, Type::b32);
            return;
        }
        if (!found) return;
        const uint32_t index = w0_ >> 16 & 127;
        if (has_dst())
            set_dst(0, scalar(index, signature_->dst[0]));
        else if (!signature_->src.empty())
            inst_.src[0] = scalar(index, signature_->src[0]);
        branch_target();
    }

    void sopc() {
        if (!known(Format::sopc, w0_ >> 16 & 127)) {
            literal_only(w0_ & 255);
            return literal_only(w0_ >> 8 & 255);
        }
        for (size_t i = 0; i < signature_->src.size(); ++i)
            inst_.src[i] = source(w0_ >> 8 * i & 255, signature_->src[i]);
        if (signature_->src.size() < 2) inst_.imm = w0_ >> 8 & 255;  // s_set_gpr_idx_on
    }

    void sopp() {
        known(Format::sopp, w0_ >> 16 & 127);
        inst_.imm = static_cast<int16_t>(w0_);
        branch_target();
    }

    void literal_only(uint32_t field) {
        if (field == 255) inst_.bytes = 8;
    }

    void smem() {
        const bool found = known(Format::smem, w0_ >> 18 & 255);
        inst_.bytes = 8;
        if (!found) return;
        const uint32_t w1 = word(1);
        const bool buffer = starts_with(inst_.name, "s_buffer");
        if (signature_->loaded) set_dst(0, scalars(w0_ >> 6 & 127, signature_->loaded));
        if (signature_->data0) inst_.src[1] = scalars(w0_ >> 6 & 127, signature_->data0);
        inst_.glc = w0_ >> 16 & 1;
        if (!starts_with(inst_.name, "s_dcache") && !starts_with(inst_.name, "s_mem"))
            inst_.src[3] = scalars((w0_ & 63) << 1, buffer ? 4 : 2);
        const bool immediate = w0_ >> 17 & 1, offset_register = w0_ >> 14 & 1;
        const int32_t offset = static_cast<int32_t>(w1 << 11) >> 11;
        if (inst_.src[3].dwords == 0) return;
        if (immediate) inst_.imm = offset;
        if (offset_register)
            inst_.src[4] = scalars(w1 >> 25 & 127, 1);
        else if (!immediate)
            inst_.src[4] = scalars(w1 & 127, 1);
    }

    // src0 of a 32-bit vector encoding, where 249 means SDWA and 250 DPP.
    void vector_sources(bool compare) {
        const uint32_t field = w0_ & 511;
        const auto& types = signature_->src;
        inst_.bytes = 4;
        const uint32_t vsrc1 = w0_ >> 9 & 255;
        const bool two = inst_.format != Format::vop1;
        size_t vector_count = 0;
        for (Type type : types) vector_count += type != Type::m64;
        if (field == 249 || field == 250) {
            const uint32_t w1 = word(1);
            inst_.bytes = 8;
            const bool sdwa = field == 249;
            (sdwa ? inst_.sdwa : inst_.dpp) = true;
            const bool scalar0 = sdwa && (w1 >> 23 & 1), scalar1 = sdwa && (w1 >> 31 & 1);
            if (vector_count > 0) inst_.src[0] = source((w1 & 255) + (scalar0 ? 0 : 256), types[0]);
            if (two && vector_count > 1)
                inst_.src[1] = source(vsrc1 + (scalar1 ? 0 : 256), types[1]);
            inst_.src[0].neg = w1 >> 20 & 1;
            inst_.src[0].abs = w1 >> 21 & 1;
            if (sdwa) {
                inst_.src[0].sel = w1 >> 16 & 7;
                inst_.src[0].sext = w1 >> 19 & 1;
                if (two) {
                    inst_.src[1].sel = w1 >> 24 & 7;
                    inst_.src[1].sext = w1 >> 27 & 1;
                    inst_.src[1].neg = w1 >> 28 & 1;
                    inst_.src[1].abs = w1 >> 29 & 1;
                }
                if (compare) {
                    if (w1 >> 15 & 1) set_dst(0, scalar(w1 >> 8 & 127, Type::m64));
                } else {
                    inst_.dst_sel = w1 >> 8 & 7;
                    inst_.dst_unused = w1 >> 11 & 3;
                    inst_.clamp = w1 >> 13 & 1;
                    inst_.omod = w1 >> 14 & 3;
                    if (inst_.dst_sel != 6 && inst_.dst_unused == 2) inst_.reads_dst = true;
                }
            } else {
                inst_.dpp_ctrl = w1 >> 8 & 511;
                inst_.bound_ctrl = w1 >> 19 & 1;
                if (two) {
                    inst_.src[1].neg = w1 >> 22 & 1;
                    inst_.src[1].abs = w1 >> 23 & 1;
                }
                inst_.bank_mask = w1 >> 24 & 15;
                inst_.row_mask = w1 >> 28 & 15;
                inst_.reads_dst = true;  // lanes without a source keep the old value
            }
        } else {
            const std::string name = inst_.name;
            const bool madmk =
                starts_with(name.c_str(), "v_fmamk") || starts_with(name.c_str(), "v_madmk");
            const bool madak =
                starts_with(name.c_str(), "v_fmaak") || starts_with(name.c_str(), "v_madak");
            if (vector_count > 0) inst_.src[0] = source(field, types[0]);
            if (madmk) {
                inst_.src[1] = source(255, types[1]);
                inst_.src[2] = source(256 + vsrc1, types[2]);
                return;
            }
            if (two && vector_count > 1) inst_.src[1] = source(256 + vsrc1, types[1]);
            if (madak) {
                inst_.src[2] = source(255, types[2]);
                return;
            }
        }
        for (size_t i = 0; i < types.size(); ++i)
            if (types[i] == Type::m64) inst_.src[i] = vcc();
    }

    void unknown_vector() {
        const uint32_t field = w0_ & 511;
        inst_.bytes = field == 249 || field == 250 || field == 255 ? 8 : 4;
        const std::string name = inst_.name;
        for (const char* prefix : {"v_fmamk", "v_fmaak", "v_madmk", "v_madak"})
            if (starts_with(name.c_str(), prefix)) inst_.bytes = 8;
    }

    void vector_dst(uint32_t field) {
        for (size_t i = 0; i < signature_->dst.size(); ++i) {
            const Type type = signature_->dst[i];
            if (type == Type::m64)
                set_dst(i, vcc());
            else if (type == Type::s32 || type == Type::s64)
                set_dst(i, scalar(field, type));
            else
                set_dst(i, vector(field, type));
        }
    }

    void vop1() {
        if (!known(Format::vop1, w0_ >> 9 & 255)) return unknown_vector();
        vector_dst(w0_ >> 17 & 255);
        vector_sources(false);
        if (inst_.name == std::string("v_swap_b32")) set_dst(1, inst_.src[0]);  // writes both
        if (inst_.name == std::string("v_accvgpr_mov_b32")) {
            inst_.src[0].index |= 256;
            inst_.dst[0].index |= 256;
        }
    }

    void vop2() {
        if (!known(Format::vop2, w0_ >> 25 & 63)) return unknown_vector();
        vector_dst(w0_ >> 17 & 255);
        vector_sources(false);
    }

    void vopc() {
        if (!known(Format::vopc, w0_ >> 17 & 255)) return unknown_vector();
        set_dst(0, vcc());
        vector_sources(true);
    }

    void vop3() {
        const uint32_t opcode = w0_ >> 16 & 1023;
        const bool found = known(Format::vop3, opcode);
        inst_.bytes = 8;
        if (!found) return;
        const uint32_t w1 = word(1);
        const bool vop3b = signature_->dst.size() == 2;
        const bool compare = opcode < 256;
        const uint32_t vdst = w0_ & 255;
        if (compare) {
            set_dst(0, scalar(vdst & 127, Type::m64));
        } else if (has_dst()) {
            const Type type = signature_->dst[0];
            set_dst(0, type == Type::s32 || type == Type::s64 ? scalar(vdst & 127, type)
                                                              : vector(vdst, type));
            if (vop3b) set_dst(1, scalar(w0_ >> 8 & 127, signature_->dst[1]));
        }
        inst_.clamp = w0_ >> 15 & 1;
        inst_.omod = w1 >> 27 & 3;
        for (size_t i = 0; i < signature_->src.size(); ++i) {
            if (i >= 3) {
                inst_.src[i] = vcc();
                continue;
            }
            Operand operand = source(w1 >> 9 * i & 511, signature_->src[i]);
            operand.neg = w1 >> (29 + i) & 1;
            if (!vop3b) {
                operand.abs = w0_ >> (8 + i) & 1;
                operand.op_sel = w0_ >> (11 + i) & 1;
            }
            inst_.src[i] = operand;
        }
        if (!vop3b) inst_.op_sel_dst = w0_ >> 14 & 1;
        // The stochastic conversions pick one of four bytes with op_sel[2] and op_sel[3].
        if (!vop3b && signature_->src.size() == 2) inst_.src[2].op_sel = w0_ >> 13 & 1;
        if (inst_.op_sel_dst) inst_.reads_dst = true;
    }

    void vop3p() {
        const bool found = known(Format::vop3p, w0_ >> 16 & 127);
        inst_.bytes = 8;
        if (!found) return;
        const uint32_t w1 = word(1);
        const std::string name = inst_.name;
        const bool matrix = inst_.unit == Unit::mfma;
        const bool acc_read = name == "v_accvgpr_read_b32",
                   acc_write = name == "v_accvgpr_write_b32";
        if (has_dst()) set_dst(0, vector(w0_ & 255, signature_->dst[0]));
        for (size_t i = 0; i < signature_->src.size() && i < 3; ++i)
            inst_.src[i] = source(w1 >> 9 * i & 511, signature_->src[i]);
        if (acc_read) inst_.src[0].index |= 256;
        if (acc_write) inst_.dst[0].index |= 256;
        if (acc_read || acc_write) return;
        if (matrix) {
            const bool acc_cd = w0_ >> 15 & 1;
            if (acc_cd) inst_.dst[0].index += 256;
            for (int i = 0; i < 2; ++i)
                if (inst_.src[i].kind == Kind::vector && (w1 >> (27 + i) & 1))
                    inst_.src[i].index += 256;
            if (acc_cd && inst_.src[2].kind == Kind::vector && !starts_with(inst_.name, "v_smfmac"))
                inst_.src[2].index += 256;
            inst_.cbsz = w0_ >> 8 & 7;
            inst_.abid = w0_ >> 11 & 15;
            inst_.blgp = w1 >> 29 & 7;
            return;
        }
        inst_.clamp = w0_ >> 15 & 1;
        for (int i = 0; i < 3; ++i) {
            inst_.src[i].op_sel = w0_ >> (11 + i) & 1;
            inst_.src[i].op_sel_hi = i == 2 ? w0_ >> 14 & 1 : w1 >> (27 + i) & 1;
            inst_.src[i].neg = w1 >> (29 + i) & 1;
            inst_.src[i].neg_hi = w0_ >> (8 + i) & 1;
        }
    }

    void ds() {
        const bool found = known(Format::ds, w0_ >> 17 & 255);
        inst_.bytes = 8;
        inst_.offset0 = w0_ & 255;
        inst_.offset1 = w0_ >> 8 & 255;
        inst_.imm = w0_ & 0xffff;
        inst_.gds = w0_ >> 16 & 1;
        if (!found) return;
        const uint32_t w1 = word(1);
        const bool acc = w0_ >> 25 & 1;
        const std::string name = inst_.name;
        const bool no_address = name == "ds_nop" || starts_with(inst_.name, "ds_read_addtid") ||
                                starts_with(inst_.name, "ds_write_addtid") || name == "ds_append" ||
                                name == "ds_consume";
        // The address is no AGPR; the one operand of ds_swizzle_b32 stands in its field.
        if (!no_address) inst_.src[0] = vector(w1 & 255, 1, false);
        if (signature_->data0) inst_.src[1] = vector(w1 >> 8 & 255, signature_->data0, acc);
        if (signature_->data1) inst_.src[2] = vector(w1 >> 16 & 255, signature_->data1, acc);
        if (signature_->loaded) set_dst(0, vector(w1 >> 24, signature_->loaded, acc));
        if (name.find("_d16") != std::string::npos && signature_->loaded) inst_.reads_dst = true;
    }

    void mubuf() {
        const bool found = known(Format::mubuf, w0_ >> 18 & 127);
        const uint32_t w1 = word(1);
        inst_.bytes = 8;
        inst_.imm = w0_ & 0xfff;
        inst_.offen = w0_ >> 12 & 1;
        inst_.idxen = w0_ >> 13 & 1;
        inst_.glc = w0_ >> 14 & 1;
        inst_.sc1 = w0_ >> 15 & 1;
        inst_.lds = w0_ >> 16 & 1;
        inst_.slc = w0_ >> 17 & 1;
        if (!found) return;
        const bool acc = w1 >> 23 & 1;
        const std::string name = inst_.name;
        if (ends_with(name, "wbl2") || ends_with(name, "inv") || ends_with(name, "wbinvl1") ||
            ends_with(name, "wbinvl1_vol"))
            return;
        const int address = inst_.offen + inst_.idxen;
        if (address) inst_.src[0] = vector(w1 & 255, address, false);
        const bool atomic = name.find("atomic") != std::string::npos;
        if (signature_->data0) inst_.src[1] = vector(w1 >> 8 & 255, signature_->data0, acc);
        if (signature_->loaded && !inst_.lds && (!atomic || inst_.glc))
            set_dst(0, vector(w1 >> 8 & 255, signature_->loaded, acc));
        if (name.find("_d16") != std::string::npos && signature_->loaded) inst_.reads_dst = true;
        inst_.src[3] = scalars((w1 >> 16 & 31) << 2, 4);
        inst_.src[4] = source(w1 >> 24, Type::b32);
    }

    void flat() {
        const uint32_t segment = w0_ >> 14 & 3;
        const Format format = segment == 0   ? Format::flat
                              : segment == 1 ? Format::scratch
                                             : Format::global;
        const bool found = segment != 3 && known(format, w0_ >> 18 & 127);
        const uint32_t w1 = word(1);
        inst_.bytes = 8;
        inst_.imm = static_cast<int32_t>(w0_ << 19) >> 19;
        if (segment == 0) inst_.imm = w0_ & 0xfff;  // flat offsets are unsigned, 12 bits
        inst_.glc = w0_ >> 16 & 1;
        inst_.slc = w0_ >> 17 & 1;
        inst_.sc1 = w0_ >> 25 & 1;
        if (!found) return;
        const std::string name = inst_.name;
        inst_.lds = name.find("_load_lds_") != std::string::npos;
        const bool acc = w1 >> 23 & 1;
        const uint32_t saddr = w1 >> 16 & 127;
        const bool has_saddr = saddr != 0x7f && segment != 0;
        if (segment == 1) {
            if (w0_ >> 13 & 1) inst_.src[0] = vector(w1 & 255, 1, false);  // sve
            if (has_saddr) inst_.src[3] = scalars(saddr, 1);
        } else {
            inst_.src[0] = vector(w1 & 255, has_saddr ? 1 : 2, false);
            if (has_saddr) inst_.src[3] = scalars(saddr, 2);
        }
        const bool atomic = name.find("atomic") != std::string::npos;
        if (signature_->data0) inst_.src[1] = vector(w1 >> 8 & 255, signature_->data0, acc);
        if (signature_->loaded && !inst_.lds && (!atomic || inst_.glc))
            set_dst(0, vector(w1 >> 24, signature_->loaded, acc));
        if (name.find("_d16") != std::string::npos && signature_->loaded) inst_.reads_dst = true;
    }

    const uint8_t* data_;
    size_t bytes_;
    uint32_t offset_ = 0, w0_ = 0;
    int literal_at_ = 1;
    Inst inst_;
    const Signature* signature_ = nullptr;
};

}  // namespace

Code decode(const uint8_t* data, size_t bytes) {
    Code code;
    code.index_of.assign(bytes / 4 + 1, -1);
    Decoder decoder(data, bytes);
    for (uint32_t offset = 0; offset + 4 <= bytes;) {
        Inst inst = decoder.next(offset);
        inst.index = static_cast<uint32_t>(code.insts.size());
        code.index_of[offset / 4] = static_cast<int32_t>(inst.index);
        code.insts.push_back(inst);
        offset += inst.bytes;
    }
    for (Inst& inst : code.insts)
        if (inst.target >= 0) inst.target = code.at(static_cast<uint64_t>(inst.target));
    return code;
}

}  // namespace emulator
