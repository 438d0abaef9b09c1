// The pickle reader: what torch.save writes becomes values, everything else is refused, whatever the bytes.

#include "torch/pickle.hpp"

#include <gtest/gtest.h>

#include <random>

namespace oscar::torch {
namespace {

using namespace std::string_literals;

constexpr int kNumMutants = 20000;

std::string text(const std::string& value) {
  return "X" + std::string(1, static_cast<char>(value.size())) + "\0\0\0"s + value;
}

// _rebuild_tensor_v2 of a float storage '7' of 12 elements: offset, sizes and strides are opcodes of one byte values.
std::string tensor(const std::string& offset, const std::string& sizes, const std::string& strides) {
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + "ctorch\nFloatStorage\n" + text("7") +
         text("cpu") + "K\x0ctQ" + offset + sizes + strides + "\x89" + "ccollections\nOrderedDict\n)RtR";
}

std::string published(const std::string& rotation) {
  return "\x80\x02}q\0("s + text("format_version") + "K\x01" + text("layers") + "}(K\x03}(" + text("rotation") +
         rotation + "uuu.";
}

std::string refusal(const std::string& bytes) {
  const auto pickle = Pickle::parse(bytes);
  return pickle ? "accepted" : pickle.error().message;
}

TEST(Pickle, ATensorOfAPublishedFileKeepsOffsetSizesAndStrides) {
  const auto pickle = Pickle::parse(published(tensor("K\x02", "K\x03K\x02\x86", "K\x01K\x04\x86")));
  ASSERT_TRUE(pickle) << pickle.error().message;
  EXPECT_EQ(*pickle->root().find("format_version")->as<std::int64_t>(), 1);
  const auto* layers = pickle->root().find("layers")->as<Dict>();
  ASSERT_NE(layers, nullptr);
  ASSERT_EQ(layers->entries.size(), 1U);
  EXPECT_EQ(*layers->entries[0].first->as<std::int64_t>(), 3);
  const auto* tensor = layers->entries[0].second->find("rotation")->as<Tensor>();
  ASSERT_NE(tensor, nullptr);
  EXPECT_EQ(tensor->storage.key, "7");
  EXPECT_EQ(tensor->storage.dtype, io::Dtype::kF32);
  EXPECT_EQ(tensor->offset, 2);
  EXPECT_EQ(tensor->shape, (io::Shape{3, 2}));
  EXPECT_EQ(tensor->strides, (io::Shape{1, 4}));
}

TEST(Pickle, NumbersKeepTheirSignAndWidth) {
  const auto pickle =
      Pickle::parse("\x80\x02(K\xffM\x01\x02J\xfe\xff\xff\xff\x8a\x02\x00\x80\x8a\x00G\xbf\xf8\0\0\0\0\0\0t."s);
  ASSERT_TRUE(pickle) << pickle.error().message;
  const auto& items = pickle->root().as<Sequence>()->items;
  ASSERT_EQ(items.size(), 6U);
  EXPECT_EQ(*items[0]->as<std::int64_t>(), 255);
  EXPECT_EQ(*items[1]->as<std::int64_t>(), 513);
  EXPECT_EQ(*items[2]->as<std::int64_t>(), -2);
  EXPECT_EQ(*items[3]->as<std::int64_t>(), -32768);
  EXPECT_EQ(*items[4]->as<std::int64_t>(), 0);
  EXPECT_EQ(*items[5]->as<double>(), -1.5);
}

TEST(Pickle, ANameThatIsNotAllowedIsRefusedByName) {
  EXPECT_NE(refusal("\x80\x02"
                    "cposix\nsystem\n" +
                    text("true") + "\x85R.")
                .find("'posix.system'"),
            std::string::npos);
  EXPECT_NE(refusal("\x80\x02"
                    "cbuiltins\neval\n.")
                .find("'builtins.eval'"),
            std::string::npos);
  EXPECT_NE(refusal("\x80\x02"
                    "ctorch\nFloatStorage\n)R.")
                .find("'torch.FloatStorage'"),
            std::string::npos);
}

TEST(Pickle, OpcodesThatBuildObjectsAreRefused) {
  for (const char opcode : {'\x81', 'b', 'i', 'o', '\x93', 'P', '\x82', 'd'}) {
    EXPECT_NE(refusal("\x80\x02))"s + opcode + ".").find("opcode"), std::string::npos) << opcode;
  }
}

TEST(Pickle, ATensorThatLeavesItsStorageIsRefused) {
  const auto refused = [](const std::string& offset, const std::string& sizes, const std::string& strides) {
    return refusal(published(tensor(offset, sizes, strides))).find("leaves its storage") != std::string::npos;
  };
  EXPECT_FALSE(refused("K\0"s, "K\x0c\x85", "K\x01\x85"));  // all 12 elements
  EXPECT_TRUE(refused("K\x01", "K\x0c\x85", "K\x01\x85"));
  EXPECT_TRUE(refused("K\0"s, "K\x02\x85", "K\x0c\x85"));
  EXPECT_TRUE(refused("J\xff\xff\xff\xff", "K\x02\x85", "K\x01\x85"));
  EXPECT_TRUE(refused("K\0"s, "K\x02\x85", "K\x01K\x01\x86"));  // ranks differ
  const std::string huge = "\x8a\x06\0\0\0\0\0\x01"s;           // 2^40
  EXPECT_TRUE(refused("K\0"s, huge + huge + "\x86", "K\0K\0\x86"s));
  EXPECT_TRUE(refused("K\0"s, huge + "\x85", huge + "\x85"));
}

TEST(Pickle, LimitsEndHostileInput) {
  EXPECT_NE(refusal("\x80\x02" + std::string(100, '(')).find("too deep"), std::string::npos);
  EXPECT_NE(refusal("\x80\x02" + std::string(Pickle::kMaxStack + 2, 'N')).find("too many"), std::string::npos);
  EXPECT_NE(refusal(std::string(Pickle::kMaxBytes + 1, 'N')).find("at most"), std::string::npos);
  EXPECT_NE(refusal("\x80\x04N.").find("protocol 4"), std::string::npos);
  for (const char* damaged :
       {"", "\x80", "\x80\x02", "\x80\x02.", "\x80\x02(N.", "\x80\x02NN.", "\x80\x02h\x05.", "\x80\x02t."}) {
    EXPECT_NE(refusal(damaged).find("damaged"), std::string::npos) << damaged;
  }
  EXPECT_NE(refusal("\x80\x02}(Nt}u.").find("damaged"), std::string::npos);  // no reach below a mark
}

TEST(Pickle, ADictionaryInsideItselfIsReadAndFreed) {
  const auto pickle = Pickle::parse("\x80\x02}q\0"s + text("me") + "h\0s."s);
  ASSERT_TRUE(pickle) << pickle.error().message;
  EXPECT_EQ(pickle->root().find("me"), &pickle->root());
}

TEST(Pickle, NoMutationCrashesTheReaderOrPassesATensorOutsideItsStorage) {
  const std::string seed = published(tensor("K\x02", "K\x03K\x02\x86", "K\x01K\x04\x86"));
  std::mt19937 random(20261201);
  const auto pick = [&](std::size_t limit) { return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random); };
  int accepted = 0;
  for (int i = 0; i < kNumMutants; ++i) {
    std::string bytes = seed;
    for (std::size_t edit = 1 + pick(3); edit > 0 && !bytes.empty(); --edit) {
      const std::size_t at = pick(bytes.size());
      switch (pick(4)) {
        case 0: bytes[at] = static_cast<char>(pick(256)); break;
        case 1: bytes.erase(at, 1 + pick(8)); break;
        case 2: bytes.insert(at, bytes.substr(pick(bytes.size()), 1 + pick(16))); break;
        case 3: bytes.resize(at); break;
      }
    }
    const auto pickle = Pickle::parse(bytes);
    if (!pickle) continue;
    ++accepted;
    const Value* layers = pickle->root().find("layers");
    const auto* dict = layers != nullptr ? layers->as<Dict>() : nullptr;
    if (dict == nullptr || dict->entries.empty()) continue;
    const Value* value = dict->entries[0].second->find("rotation");
    const auto* tensor = value != nullptr ? value->as<Tensor>() : nullptr;
    if (tensor == nullptr) continue;
    std::int64_t last = tensor->offset;
    for (std::size_t d = 0; d < tensor->shape.size(); ++d) {
      if (tensor->shape[d] == 0) last = -1;
      if (last >= 0) last += (tensor->shape[d] - 1) * tensor->strides[d];
    }
    ASSERT_LT(last, tensor->storage.num_elements) << i;
  }
  EXPECT_GT(accepted, 0) << "every mutant was refused: the mutations no longer reach the parser's depth";
}

}  // namespace
}  // namespace oscar::torch
