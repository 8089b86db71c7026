#include "isa/signatures.h"

#include <array>
#include <deque>
#include <sstream>
#include <stdexcept>
#include <unordered_map>

namespace emulator {
namespace {

Type type_named(const std::string& word) {
    static const std::unordered_map<std::string, Type> types = {
        {"b16", Type::b16},     {"f16", Type::f16},     {"pk16", Type::pk16},
        {"pkf16", Type::pkf16}, {"b32", Type::b32},     {"f32", Type::f32},
        {"b64", Type::b64},     {"f64", Type::f64},     {"pkf32", Type::pkf32},
        {"b96", Type::b96},     {"b128", Type::b128},   {"b256", Type::b256},
        {"b512", Type::b512},   {"b1024", Type::b1024}, {"m64", Type::m64},
        {"s32", Type::s32},     {"s64", Type::s64}};
    auto found = types.find(word);
    if (found == types.end()) throw std::logic_error("operand type " + word);
    return found->second;
}

Signature parse(const char* name, Unit unit, const char* text) {
    Signature signature;
    signature.name = name;
    signature.unit = unit;
    int part = 0;  // 0 destinations, 1 sources, 2 flags
    std::string word;
    auto finish = [&] {
        if (word.empty()) return;
        if (part == 2) {
            if (word == "scc")
                signature.reads_scc = true;
            else if (word == "scc=")
                signature.writes_scc = true;
            else if (word == "exec=")
                signature.writes_exec = true;
            else
                throw std::logic_error("flag " + word);
        } else if (part == 1) {
            signature.src.push_back(type_named(word));
        } else {
            if (word.back() == '+') signature.reads_dst = true, word.pop_back();
            signature.dst.push_back(type_named(word));
        }
        word.clear();
    };
    for (const char* c = text; *c; ++c) {
        if (*c == ' ')
            finish();
        else if (*c == ':')
            finish(), part = 1;
        else if (*c == '|')
            finish(), part = 2;
        else
            word += *c;
    }
    finish();
    return signature;
}

constexpr int kFormats = static_cast<int>(Format::global) + 1;

}  // namespace

uint8_t dwords_of(Type type) {
    switch (type) {
        case Type::none:
            return 0;
        case Type::b64:
        case Type::f64:
        case Type::pkf32:
        case Type::m64:
        case Type::s64:
            return 2;
        case Type::b96:
            return 3;
        case Type::b128:
            return 4;
        case Type::b256:
            return 8;
        case Type::b512:
            return 16;
        case Type::b1024:
            return 32;
        default:
            return 1;
    }
}

const std::vector<Signature>& signatures() {
    static const std::vector<Signature> table = [] {
        std::vector<Signature> out(1);
#define OP(name, unit, text) out.push_back(parse(#name, Unit::unit, text));
#define MEMORY(name, unit, loaded, data0, data1) \
    out.push_back(                               \
        {#name, Unit::unit, true, {}, {}, false, false, false, false, loaded, data0, data1});
#include "isa/ops_scalar.def"
#include "isa/ops_vector.def"
#include "isa/ops_memory.def"
#undef OP
#undef MEMORY
        return out;
    }();
    return table;
}

const Encoded& encoded(Format format, uint32_t opcode) {
    static std::deque<std::string> names;  // of the table, in places that last
    static const auto table = [] {
        std::unordered_map<std::string, Op> by_name;
        for (size_t i = 1; i < signatures().size(); ++i)
            by_name[signatures()[i].name] = static_cast<Op>(i);
        std::array<std::vector<Encoded>, kFormats> out;
        for (auto& list : out) list.resize(1024);
        auto add = [&](Format format, int opcode, const char* mnemonics) {
            std::istringstream words(mnemonics);
            for (std::string word; words >> word; ++opcode) {
                const auto found = by_name.find(word);
                const Op op = found == by_name.end() ? Op::unknown : found->second;
                names.push_back(word);
                out[static_cast<int>(format)][opcode] = {names.back().c_str(), op};
            }
        };
#define ENCODINGS(format, first, mnemonics) add(Format::format, first, mnemonics);
#include "isa/encodings.def"
#undef ENCODINGS
        return out;
    }();
    return table[static_cast<int>(format)][opcode];
}

}  // namespace emulator
