#include "prompts.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace oscar::tool {
namespace {

struct Message {
  std::string role, content;
};

std::string string_of(const nlohmann::json& object, const char* field) {
  const auto found = object.find(field);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

// Empty when the line holds no conversation.
std::vector<Message> messages_of(const nlohmann::json& line) {
  if (const std::string prompt = string_of(line, "prompt"); !prompt.empty()) return {{"user", prompt}};
  std::vector<Message> messages;
  const auto found = line.find("messages");
  if (found == line.end() || !found->is_array()) return {};
  for (const auto& message : *found) {
    if (!message.is_object()) return {};
    messages.push_back({string_of(message, "role"), string_of(message, "content")});
    if (messages.back().role.empty()) return {};
  }
  return messages;
}

// Empty when llama.cpp cannot apply the template.
std::string apply_template(const char* chat_template, const std::vector<Message>& messages) {
  std::vector<llama_chat_message> chat;
  std::size_t bytes = 256;
  for (const Message& message : messages) {
    chat.push_back({message.role.c_str(), message.content.c_str()});
    bytes += 2 * (message.role.size() + message.content.size());
  }
  std::string text(bytes, '\0');
  for (int attempt = 0; attempt < 2; ++attempt) {
    const std::int32_t length = llama_chat_apply_template(chat_template, chat.data(), chat.size(), false, text.data(),
                                                          static_cast<std::int32_t>(text.size()));
    if (length < 0) return {};
    const bool fits = static_cast<std::size_t>(length) <= text.size();
    text.resize(static_cast<std::size_t>(length));
    if (fits) break;
  }
  return text;
}

}  // namespace

Status render_prompts(TextFile& file, const Model& model) {
  if (!file.path.ends_with(".jsonl")) return {};
  const char* chat_template = llama_model_chat_template(model.get(), nullptr);
  std::string text;
  std::string_view rest = file.content;
  for (int number = 1; !rest.empty(); ++number) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const auto bad = [&](const std::string& what) {
      return make_error(ErrorCode::kBadInput, fmt::format("{}, line {}: {}", file.path, number, what));
    };
    const auto json = nlohmann::json::parse(line, nullptr, false);
    if (!json.is_object()) return bad("is not a JSON object; a .jsonl file has one a line");
    if (const std::string plain = string_of(json, "text"); !plain.empty()) {
      text += plain + "\n";
      continue;
    }
    const std::vector<Message> messages = messages_of(json);
    if (messages.empty()) return bad("has none of \"messages\" (role and content each), \"prompt\" and \"text\"");
    if (chat_template == nullptr)
      return bad("the model has no chat template; write the prompts out and name the field \"text\"");
    const std::string chat = apply_template(chat_template, messages);
    if (chat.empty())
      return bad("llama.cpp cannot apply the model's chat template; write the prompts out and name the field \"text\"");
    text += chat;
  }
  if (text.empty()) return make_error(ErrorCode::kBadInput, file.path + ": has no prompts");
  file.content = std::move(text);
  file.has_control_tokens = true;
  return {};
}

}  // namespace oscar::tool
